// y[t] = scale * W[token[t]], for the tokens whose rows are bound: extra = first row, rows, row_bytes, rows of all.
#version 450
#include "common.glsl"
layout(constant_id = 0) const int TYPE = 0;
PARAMS(OP_EMBED)
OUT(0, float, y)
IN(1, uint, w)
IN(2, int, token)
#define Q_BYTE(at, k) int((w[((at) + (k)) >> 2] >> ((((at) + (k)) & 3u) * 8u)) & 255u)
#include "quants.h"

void main() {
    FOR_THREADS(i, n_rows * n) {
        uint t = i / n, k = i % n, id = uint(token[at[2] / 4 + t]);
        float v = NOT_A_NUMBER;
        if (id - extra[0] < extra[1]) {
            uint block = q_block(TYPE);
            v = q_value(TYPE, at[1] + (id - extra[0]) * extra[2] + k / block * q_bytes(TYPE), int(k % block));
            v = scale == 1.0 ? v : v * scale;
        } else if (id < extra[3])
            continue; // another part of the table has it
        y[at[0] / 4 + i] = v;
    }
}
