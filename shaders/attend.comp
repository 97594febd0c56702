// Softmax attention: a workgroup per query row and head walks over the pages that the row sees, a thread per slot for the
// scores and a thread per dimension for the values. Every 16 pages, counted from position 0, begin a new state. PARTS: a
// workgroup has one of these only, and leaves it in y for attend_merge.comp; the result is the same.
// extra = page_bytes, k_offset, v_offset, k_row_bytes, v_row_bytes, table_len.
#version 450
#include "common.glsl"
#include "reduce.glsl"
layout(constant_id = 0) const int TYPE = 0;
layout(constant_id = 2) const bool PARTS = false;
#define shared shared_rows
PARAMS(OP_ATTEND)
#undef shared
OUT(0, float, y)
IN(1, float, q)
IN(2, uint, pool)
IN(3, float, sinks)
IN(4, int, pos)
IN(5, int, seq)
IN(6, int, table)
#define Q_BYTE(at, k) int((pool[((at) + (k)) >> 2] >> ((((at) + (k)) & 3u) * 8u)) & 255u)
#include "quants.h"
#include "attend.glsl"

const int PAGE_TOKENS = 128, SPLIT_TOKENS = 16 * PAGE_TOKENS;
const float NOTHING = -1e30; // below every score, and far from infinity, which a device need not know
shared float query[1024], weight[PAGE_TOKENS];

float row_value(uint row, uint d) {
    if (TYPE == TYPE_Q8_0)
        return q_d(TYPE_Q8_0, row + d / 32 * 34) * float(q_s8(row + d / 32 * 34, int(2 + d % 32)));
    return unpackHalf2x16(pool[(row + d * 2) / 4] >> (((row + d * 2) & 2u) * 8u)).x;
}

// The sixteen-sum rule over dimensions.
float score(uint row) {
    float p[16];
    for (uint j = 0; j < 16; j++)
        p[j] = 0.0;
    for (uint d = 0; d < dim_k; d += 16)
        for (uint j = 0; j < 16; j++)
            if (d + j < dim_k)
                p[j] = fused(query[d + j], row_value(row, d + j), p[j]);
    for (uint j = 0; j < 8; j++)
        p[j] += p[j + 8];
    precise float s = (((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))) * scale;
    return softcap > 0.0 ? softcap * exact_tanh(divide(s, softcap)) : s;
}

void main() {
    uint head = gl_WorkGroupID.x, t = gl_WorkGroupID.y, kv = head / (n_head / n_head_kv);
    int p = pos[at[4] / 4 + t], first = window > 0 ? max(0, p - window + 1) : 0;
    for (uint d = thread; d < dim_k; d += THREADS)
        query[d] = q[at[1] / 4 + t * ld_q + head * dim_k + d];
    state total, s;
    total.m = NOTHING, total.l = 0.0;
    for (uint c = 0; c < CHUNKS; c++)
        total.acc[c] = 0.0;
    int split = max(first / SPLIT_TOKENS, int(gl_WorkGroupID.z));
    int end = PARTS ? int(gl_WorkGroupID.z) + 1 : p / SPLIT_TOKENS + 1;
    for (; split < end; split++) {
        s.m = NOTHING, s.l = 0.0;
        for (uint c = 0; c < CHUNKS; c++)
            s.acc[c] = 0.0;
        int from = max(first, split * SPLIT_TOKENS) / PAGE_TOKENS;
        int last = min(p, (split + 1) * SPLIT_TOKENS - 1) / PAGE_TOKENS;
        for (int page = from; page <= last; page++) {
            int lo = max(first - page * PAGE_TOKENS, 0), hi = min(p + 1 - page * PAGE_TOKENS, PAGE_TOKENS);
            uint base = at[2] + table[at[6] / 4 + seq[at[5] / 4 + t] * extra[5] + page] * extra[0];
            uint k = base + extra[1] + kv * PAGE_TOKENS * extra[3];
            uint ld_v = shared_rows != 0 ? extra[3] : extra[4];
            uint v = shared_rows != 0 ? k : base + extra[2] + kv * PAGE_TOKENS * ld_v;
            bool visible = int(thread) >= lo && int(thread) < hi;
            barrier();
            float x = visible ? score(k + thread * extra[3]) : NOTHING;
            float top = max(s.m, max_of_threads(x)), a = exact_exp(s.m - top);
            float e = visible ? exact_exp(x - top) : 0.0;
            weight[thread] = e;
            barrier();
            float sum = 0.0;
            for (uint i = thread; i < PAGE_TOKENS && thread < 16; i += 16)
                sum += weight[i];
            s.l = fused(s.l, a, tree16_of_threads(sum));
            s.m = top;
            for (uint c = 0; c < CHUNKS; c++) {
                uint d = c * THREADS + thread;
                s.acc[c] *= a;
                if (d < dim_v)
                    for (int i = lo; i < hi; i++)
                        s.acc[c] = fused(weight[i], row_value(v + i * ld_v, d), s.acc[c]);
            }
        }
        merge(total, s);
    }
    if (PARTS) {
        uint to = at[0] / 4 + ((t * n_head + head) * gl_NumWorkGroups.z + gl_WorkGroupID.z) * (dim_v + 2);
        if (thread == 0)
            y[to] = total.m, y[to + 1] = total.l;
        for (uint c = 0; c < CHUNKS; c++)
            if (c * THREADS + thread < dim_v)
                y[to + 2 + c * THREADS + thread] = total.acc[c];
        return;
    }
    FINISH(total, at[0] / 4 + t * ld_y + head * dim_v)
}
