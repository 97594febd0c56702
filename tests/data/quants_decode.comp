#version 450
// Decodes blocks of any format through shaders/quants.h, from a buffer of words.
layout(local_size_x = 64) in;
layout(binding = 0) readonly buffer Blocks { uint words[]; };
layout(binding = 1) writeonly buffer Values { float values[]; };
layout(push_constant) uniform Push { int type; int n; };

int byte_at(uint k) { return int((words[k >> 2] >> ((k & 3u) * 8u)) & 255u); }
#define Q_BYTE(at, k) byte_at((at) + uint(k))
#include "quants.h"

void main() {
    int i = int(gl_GlobalInvocationID.x);
    if (i < n)
        values[i] = q_value(type, uint(i / q_block(type) * q_bytes(type)), i % q_block(type));
}
