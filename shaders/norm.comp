// y = x / sqrt(mean(x^2) + eps) * weight: a workgroup per part of a row. y may be x.
#version 450
#include "common.glsl"
#include "reduce.glsl"
PARAMS(OP_NORM)
OUT(0, float, y)
IN(1, float, x)
IN(2, float, w)

void main() {
    FOR_GROUPS(i, n_rows * n_part) {
        uint from = at[1] / 4 + i / n_part * ld_x + i % n_part * n, to = at[0] / 4 + i / n_part * ld_y + i % n_part * n;
        float s = 0.0;
        for (uint k = thread; k < n; k += THREADS)
            s = fma(x[from + k], x[from + k], s);
        float r = 1.0 / sqrt(sum_of_threads(s) / float(n) + eps);
        for (uint k = thread; k < n; k += THREADS) {
            float weight = weight_kind == 0 ? 1.0 : w[at[2] / 4 + k] + (weight_kind == 2 ? 1.0 : 0.0);
            y[to + k] = x[from + k] * r * weight;
        }
    }
}
