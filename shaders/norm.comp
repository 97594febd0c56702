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
        float s = 0.0; // sixteen threads add, the others wait: the order is the CPU's
        if (thread < 16)
            for (uint k = thread; k < n; k += 16)
                s = fused(x[from + k], x[from + k], s);
        precise float mean = divide(tree16_of_threads(s), float(n)) + eps;
        float r = divide(1.0, root(mean));
        for (uint k = thread; k < n; k += THREADS) {
            float weight = weight_kind == 0 ? 1.0 : w[at[2] / 4 + k] + (weight_kind == 2 ? 1.0 : 0.0);
            precise float v = x[from + k] * r * weight;
            y[to + k] = v;
        }
    }
}
