// The states that attend.comp left, in ascending order, become the result. extra = states of a query row.
#version 450
#include "common.glsl"
#define shared shared_rows
PARAMS(OP_ATTEND)
#undef shared
#include "attend.glsl"
OUT(0, float, y)
IN(1, float, states)
IN(3, float, sinks)

void main() {
    uint head = gl_WorkGroupID.x, t = gl_WorkGroupID.y;
    state total, s;
    total.m = 0.0, total.l = 0.0;
    for (uint c = 0; c < CHUNKS; c++)
        total.acc[c] = 0.0;
    for (uint i = 0; i < extra[0]; i++) {
        uint from = at[1] / 4 + ((t * n_head + head) * extra[0] + i) * (dim_v + 2);
        s.m = states[from], s.l = states[from + 1];
        for (uint c = 0; c < CHUNKS; c++)
            s.acc[c] = c * THREADS + thread < dim_v ? states[from + 2 + c * THREADS + thread] : 0.0;
        merge(total, s);
    }
    FINISH(total, at[0] / 4 + t * ld_y + head * dim_v)
}
