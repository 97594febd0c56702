// Activations of a matmul as int8 blocks, with the rules of chapter QUANTS. A row of each group becomes n_in / 4 words of
// integers, then a float dx for each 32 values. A thread holds four values.
#version 450
#include "common.glsl"
layout(constant_id = 0) const int BLOCK = 32;
PARAMS(OP_MATMUL)
OUT(0, uint, q)
IN(1, float, x)
shared uint most[THREADS];

void main() {
    uint words = n_in / 4, tiles = (words + THREADS - 1) / THREADS;
    FOR_GROUPS(tile, n_rows * n_group * tiles) {
        uint row = tile / tiles, j = tile % tiles * THREADS + thread;
        vec4 v = vec4(0.0);
        if (j < words) {
            uint from = at[1] / 4 + row / n_group * ld_x + row % n_group * n_in + j * 4;
            v = vec4(x[from], x[from + 1], x[from + 2], x[from + 3]);
        }
        barrier();
        most[thread] = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
        barrier();
        for (uint k = BLOCK / 8; k > 0; k /= 2) { // neighbours; every thread of a block ends with the largest
            uint other = most[thread ^ k];
            barrier();
            most[thread] = max(most[thread], other);
            barrier();
        }
        uint amax = most[thread], packed = 0u;
        float dx = amax >= INFINITE ? NOT_A_NUMBER : 0.0;
        if (amax < INFINITE && amax >= 0x0d800000u) { // 2^-100
            float f = uintBitsToFloat(amax);
            dx = exact_div(f, 127.0);
            ivec4 i = ivec4(roundEven(v * exact_div(127.0, f)));
            packed = uint(i.x & 255) | uint(i.y & 255) << 8 | uint(i.z & 255) << 16 | uint(i.w) << 24;
        }
        if (j < words) {
            uint to = at[0] / 4 + row * (words + n_in / 32);
            q[to + j] = packed;
            if (j % 8 == 0)
                q[to + words + j / 8] = floatBitsToUint(dx);
        }
    }
}
