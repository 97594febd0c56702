// attend.glsl: what a query row of one head has gathered, and how such states become one. Thread i holds the values i,
// i + 128, ... CHUNKS (at most 8) of them. l is 0 only where nothing was visible.
layout(constant_id = 1) const uint CHUNKS = 1;

struct state {
    float m, l, acc[8];
};

void merge(inout state total, state part) {
    if (part.l == 0.0)
        return;
    if (total.l == 0.0) {
        total = part;
        return;
    }
    precise float top = max(part.m, total.m), a = exact_exp(total.m - top), b = exact_exp(part.m - top);
    total.m = top;
    precise float l = part.l * b;
    total.l = fused(total.l, a, l);
    for (uint c = 0; c < CHUNKS; c++) {
        precise float v = part.acc[c] * b;
        total.acc[c] = fused(total.acc[c], a, v);
    }
}

// The state as values. to: of the first.
#define FINISH(s, to)                                                                                                  \
    float a = 1.0;                                                                                                     \
    if (has_sinks != 0 && s.l != 0.0) {                                                                                \
        float sink = sinks[at[3] / 4 + head], top = max(sink, s.m);                                                    \
        a = exact_exp(s.m - top);                                                                                      \
        s.l = fused(s.l, a, exact_exp(sink - top));                                                                    \
    }                                                                                                                  \
    for (uint c = 0; c < CHUNKS; c++)                                                                                  \
        if (c * THREADS + thread < dim_v) {                                                                            \
            precise float v = s.acc[c] * a;                                                                            \
            y[to + c * THREADS + thread] = s.l == 0.0 ? 0.0 : divide(v, s.l);                                          \
        }
