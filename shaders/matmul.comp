// y (+)= W x (+ bias), rows of W from extra[0] to extra[1] (of all groups; the binding begins at the first), extra[2] =
// row_bytes. For quantized weights x is what quantize.comp made.
//
// A workgroup takes sixteen rows of W, eight threads to each, and up to COUNT rows of x. Thread l has the partial sum l of
// the eight (two of the sixteen for float formats) that chapter QUANTS prescribes, and the order is the one written
// there. So a result does not depend on COUNT or on the other rows, and has the CPU's bits.
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

const uint LANES = 8, ROWS = THREADS / LANES;
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
    uint n_block = n_in / q_block(TYPE), units = q_block(TYPE) / 32, words = n_in / 4, stride = words + n_in / 32;
    FOR_GROUPS(tile, tiles) {
        uint row = extra[0] + tile * ROWS + thread / LANES, group = row / n_out;
        uint from = at[1] + (row - extra[0]) * extra[2];
        float sum[COUNT], upper[COUNT]; // upper: the partial sums 8 to 15
        for (uint c = 0; c < COUNT; c++)
            sum[c] = upper[c] = 0.0;
        if (row < extra[1] && units == 0) {
            uint x0 = at[2] / 4 + t0 * ld_x + group * n_in;
            for (uint k = lane; k < n_in; k += 16) {
                float v = q_value(TYPE, from + k * q_bytes(TYPE), 0);
                float o = k + 8 < n_in ? q_value(TYPE, from + (k + 8) * q_bytes(TYPE), 0) : 0.0;
                for (uint c = 0; c < COUNT; c++)
                    if (t0 + c < n_rows) {
                        sum[c] = fused(v, uintBitsToFloat(x[x0 + c * ld_x + k]), sum[c]);
                        if (k + 8 < n_in)
                            upper[c] = fused(o, uintBitsToFloat(x[x0 + c * ld_x + k + 8]), upper[c]);
                    }
            }
        } else if (row < extra[1]) {
            for (uint i = lane; i < n_block; i += LANES) {
                uint b = from + i * q_bytes(TYPE);
                int dots[COUNT], mins[COUNT];
                for (uint c = 0; c < COUNT; c++)
                    dots[c] = mins[c] = 0;
                for (uint u = 0; u < units; u++) {
                    uint q[8];
                    unit_quants(b, u, q);
                    int sub = int(u) * 32 / q_sub(TYPE), next = sub + 32 / q_sub(TYPE) - 1; // of the two halves
                    int scale0 = q_sub_scale(TYPE, b, sub), scale1 = q_sub_scale(TYPE, b, next);
                    int min0 = units > 1 ? q_sub_min(TYPE, b, sub) : 1, min1 = units > 1 ? q_sub_min(TYPE, b, next) : 1;
                    for (uint c = 0; c < COUNT; c++)
                        if (t0 + c < n_rows) {
                            uint xq = at[2] / 4 + ((t0 + c) * n_group + group) * stride + (i * units + u) * 8;
                            int a0 = 0, a1 = 0, s0 = 0, s1 = 0;
                            for (uint j = 0; j < 4; j++) {
                                a0 += dot4(q[j], x[xq + j]);
                                a1 += dot4(q[j + 4], x[xq + 4 + j]);
                                if (has_min()) {
                                    s0 += dot4(0x01010101u, x[xq + j]);
                                    s1 += dot4(0x01010101u, x[xq + 4 + j]);
                                }
                            }
                            dots[c] += scale0 * a0 + scale1 * a1;
                            mins[c] += min0 * s0 + min1 * s1;
                        }
                }
                float d = q_d(TYPE, b), m = units > 1 ? -q_dmin(TYPE, b) : q_dmin(TYPE, b);
                for (uint c = 0; c < COUNT; c++)
                    if (t0 + c < n_rows) {
                        float dx = uintBitsToFloat(x[at[2] / 4 + ((t0 + c) * n_group + group) * stride + words + i * units]);
                        sum[c] = fused(d * dx, float(dots[c]), sum[c]);
                        if (has_min())
                            sum[c] = fused(m * dx, float(mins[c]), sum[c]);
                    }
            }
        }
        barrier();
        for (uint c = 0; c < COUNT; c++)
            part[c * THREADS + thread] = units == 0 ? sum[c] + upper[c] : sum[c];
        barrier();
        for (uint i = thread; i < ROWS * COUNT; i += THREADS) {
            uint c = i / ROWS, r = i % ROWS, to = extra[0] + tile * ROWS + r;
            if (t0 + c >= n_rows || to >= extra[1])
                continue;
            uint p = c * THREADS + r * LANES;
            precise float even = (part[p] + part[p + 4]) + (part[p + 2] + part[p + 6]);
            precise float odd = (part[p + 1] + part[p + 5]) + (part[p + 3] + part[p + 7]);
            precise float total = even + odd;
            if (has_bias != 0)
                total += bias[at[3] / 4 + to];
            uint o = at[0] / 4 + (t0 + c) * ld_y + to;
            y[o] = accumulate != 0 ? y[o] + total : total;
        }
    }
}
