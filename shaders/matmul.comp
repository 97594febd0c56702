// y (+)= W x (+ bias), rows of W from extra[0] to extra[1] (of all groups; the binding begins at the first), extra[2] =
// row_bytes. For quantized weights x is what quantize.comp made.
//
// A workgroup takes eight rows of W, sixteen threads to each, and up to COUNT rows of x. Thread l adds units (32 values of
// a quantized format, single values of a float one) l, l + 16, ... in that order; the sixteen sums are added from 0 up. So
// a result does not depend on COUNT or on the other rows. Inside a unit all is exact integer arithmetic.
#version 450
#extension GL_EXT_control_flow_attributes : require
#include "common.glsl"
layout(constant_id = 0) const int TYPE = 0;
layout(constant_id = 1) const uint COUNT = 1;
PARAMS(OP_MATMUL)
OUT(0, float, y)
IN(1, uint, w)
IN(2, uint, x)
IN(3, float, bias)
#define Q_BYTE(at, k) int((w[((at) + (k)) >> 2] >> ((((at) + (k)) & 3u) * 8u)) & 255u)
#include "quants.h"

const uint LANES = 16, ROWS = THREADS / LANES;
shared float part[COUNT * THREADS];

// Sum of four products of signed bytes.
int dot4(uint a, uint b) {
    ivec4 p = ivec4(a << 24, a << 16, a << 8, a) >> 24, r = ivec4(b << 24, b << 16, b << 8, b) >> 24;
    p *= r;
    return p.x + p.y + p.z + p.w;
}

// The word at any even byte.
uint word(uint at) {
    uint i = at >> 2;
    return (at & 3u) == 0u ? w[i] : (w[i] >> 16) | (w[i + 1] << 16);
}

uint minus8(uint nibbles) { return ((nibbles | 0x80808080u) - 0x08080808u) ^ 0x80808080u; }

// The 32 integers of unit u of the block at b.
void unit_quants(uint b, uint u, out uint q[8]) {
    if (TYPE == TYPE_Q8_0) {
        for (uint i = 0; i < 8; i++)
            q[i] = word(b + 2 + i * 4);
    } else if (TYPE == TYPE_Q4_0) {
        for (uint i = 0; i < 4; i++) {
            uint v = word(b + 2 + i * 4);
            q[i] = minus8(v & 0x0f0f0f0fu);
            q[i + 4] = minus8((v >> 4) & 0x0f0f0f0fu);
        }
    } else if (TYPE == TYPE_Q4_K) { // 144 bytes: always whole words
        for (uint i = 0; i < 8; i++)
            q[i] = (w[(b + 16 + u / 2 * 32) / 4 + i] >> ((u & 1u) * 4)) & 0x0f0f0f0fu;
    } else {
        [[dont_unroll]] for (uint i = 0; i < 8; i++) { // unrolled, drivers compile it for seconds
            q[i] = 0u;
            [[dont_unroll]] for (uint j = 0; j < 4; j++)
                q[i] |= uint(q_quant(TYPE, b, int(u * 32 + i * 4 + j)) & 255) << (j * 8);
        }
    }
}

bool has_min() {
    return TYPE == TYPE_Q4_1 || TYPE == TYPE_Q5_1 || TYPE == TYPE_Q2_K || TYPE == TYPE_Q4_K || TYPE == TYPE_Q5_K;
}

void main() {
    uint t0 = gl_WorkGroupID.y * COUNT, lane = thread % LANES;
    uint tiles = (extra[1] - extra[0] + ROWS - 1) / ROWS;
    bool floats = q_block(TYPE) == 1;
    FOR_GROUPS(tile, tiles) {
        uint row = extra[0] + tile * ROWS + thread / LANES, group = row / n_out;
        uint from = at[1] + (row - extra[0]) * extra[2];
        float sum[COUNT];
        for (uint c = 0; c < COUNT; c++)
            sum[c] = 0.0;
        if (row < extra[1] && floats) {
            for (uint k = lane; k < n_in; k += LANES) {
                float v = q_value(TYPE, from + k * q_bytes(TYPE), 0);
                for (uint c = 0; c < COUNT; c++)
                    if (t0 + c < n_rows)
                        sum[c] = fma(v, uintBitsToFloat(x[at[2] / 4 + (t0 + c) * ld_x + group * n_in + k]), sum[c]);
            }
        } else if (row < extra[1]) {
            uint per_block = q_block(TYPE) / 32, words = n_in / 4, stride = words + n_in / 32;
            for (uint i = lane; i < n_in / 32; i += LANES) {
                uint b = from + i / per_block * q_bytes(TYPE), u = i % per_block, q[8];
                unit_quants(b, u, q);
                int sub = int(u) * 32 / q_sub(TYPE), next = sub + 32 / q_sub(TYPE) - 1; // of the first and the other 16
                int scale0 = q_sub_scale(TYPE, b, sub), scale1 = q_sub_scale(TYPE, b, next);
                int min0 = q_sub_min(TYPE, b, sub), min1 = q_sub_min(TYPE, b, next);
                float d = q_d(TYPE, b), m = q_dmin(TYPE, b);
                if (q_block(TYPE) == 32)
                    min0 = 1, min1 = 1;
                else
                    m = -m;
                for (uint c = 0; c < COUNT; c++)
                    if (t0 + c < n_rows) {
                        uint xq = at[2] / 4 + ((t0 + c) * n_group + group) * stride;
                        int a0 = 0, a1 = 0, s0 = 0, s1 = 0;
                        for (uint j = 0; j < 4; j++) {
                            uint x0 = x[xq + i * 8 + j], x1 = x[xq + i * 8 + 4 + j];
                            a0 += dot4(q[j], x0);
                            a1 += dot4(q[j + 4], x1);
                            if (has_min()) {
                                s0 += dot4(0x01010101u, x0);
                                s1 += dot4(0x01010101u, x1);
                            }
                        }
                        float dx = uintBitsToFloat(x[xq + words + i]);
                        sum[c] = fma(d * dx, float(scale0 * a0 + scale1 * a1), sum[c]);
                        if (has_min())
                            sum[c] = fma(m * dx, float(min0 * s0 + min1 * s1), sum[c]);
                    }
            }
        }
        barrier();
        for (uint c = 0; c < COUNT; c++)
            part[c * THREADS + thread] = sum[c];
        barrier();
        for (uint i = thread; i < ROWS * COUNT; i += THREADS) {
            uint c = i / ROWS, r = i % ROWS, to = extra[0] + tile * ROWS + r;
            if (t0 + c >= n_rows || to >= extra[1])
                continue;
            float total = part[c * THREADS + r * LANES];
            for (uint l = 1; l < LANES; l++)
                total += part[c * THREADS + r * LANES + l];
            if (has_bias != 0)
                total += bias[at[3] / 4 + to];
            uint o = at[0] / 4 + (t0 + c) * ld_y + to;
            y[o] = accumulate != 0 ? y[o] + total : total;
        }
    }
}
