// Stores key and value rows into pages: a thread per 32 values of a row. extra = page_bytes, k_offset, v_offset,
// k_row_bytes, v_row_bytes, table_len. Rows begin at even bytes: a word shared by two rows is written by halves.
#version 450
#include "common.glsl"
layout(constant_id = 0) const int TYPE = 0;
#define shared shared_rows // the word is taken
PARAMS(OP_KV_PUT)
#undef shared
OUT(0, uint, pool)
IN(1, float, k)
IN(2, float, v)
IN(3, int, pos)
IN(4, int, seq)
IN(5, int, table)
#define Q_BYTE(at, k) 0
#include "quants.h"

const uint PAGE_TOKENS = 128;

void put_half(uint at, uint h) {
    uint shift = (at & 2u) * 8u;
    atomicAnd(pool[at / 4], 0xffff0000u >> shift);
    atomicOr(pool[at / 4], h << shift);
}

void put_halves(uint at, uint h[17], uint n) {
    uint i = 0;
    if ((at & 2u) != 0u && n > 0)
        put_half(at, h[i++]);
    for (; i + 2 <= n; i += 2)
        pool[(at + i * 2) / 4] = h[i] | h[i + 1] << 16;
    if (i < n)
        put_half(at + i * 2, h[i]);
}

void main() {
    uint k_parts = (dim_k + 31) / 32, v_parts = shared_rows != 0 ? 0 : (dim_v + 31) / 32, parts = k_parts + v_parts;
    FOR_THREADS(i, n_rows * n_head_kv * parts) {
        uint part = i % parts, head = i / parts % n_head_kv, t = i / parts / n_head_kv;
        bool key = part < k_parts;
        part -= key ? 0 : k_parts;
        uint p = pos[at[3] / 4 + t], dim = key ? dim_k : dim_v;
        uint id = table[at[5] / 4 + seq[at[4] / 4 + t] * extra[5] + p / PAGE_TOKENS];
        uint to = at[0] + id * extra[0] + (key ? extra[1] : extra[2]) +
                  (head * PAGE_TOKENS + p % PAGE_TOKENS) * (key ? extra[3] : extra[4]);
        float value[32];
        uint amax = 0u, h[17];
        for (uint j = 0; j < 32; j++) {
            uint d = part * 32 + j;
            value[j] = 0.0;
            if (d < dim)
                value[j] = key ? k[at[1] / 4 + t * ld_k + head * dim_k + d] : v[at[2] / 4 + t * ld_v + head * dim_v + d];
            amax = max(amax, magnitude(value[j]));
        }
        if (TYPE == TYPE_F16) {
            uint n = min(32u, dim - part * 32);
            for (uint half_rows = 0; half_rows < 2; half_rows++) {
                for (uint j = 0; j < 16; j++)
                    h[j] = to_half(value[half_rows * 16 + j]);
                uint begin = min(n, half_rows * 16);
                put_halves(to + part * 64 + begin * 2, h, min(n - begin, 16u));
            }
        } else {
            h[0] = amax >= INFINITE ? 0x7e00u : amax < 0x0d800000u ? 0u : to_half(exact_div(uintBitsToFloat(amax), 127.0));
            bool empty = h[0] == 0u || h[0] >= 0x7c00u;
            h[0] = h[0] >= 0x7c00u ? 0x7e00u : h[0];
            float factor = empty ? 0.0 : exact_div(1.0, q_half(h[0]));
            for (uint j = 0; j < 16; j++) {
                int a = empty ? 0 : int(roundEven(clamp(value[2 * j] * factor, -127.0, 127.0)));
                int b = empty ? 0 : int(roundEven(clamp(value[2 * j + 1] * factor, -127.0, 127.0)));
                h[1 + j] = uint(a & 255) | uint(b & 255) << 8;
            }
            put_halves(to + part * 34, h, 17);
        }
    }
}
