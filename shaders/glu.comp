// y = act(gate) * up. y may be gate.
#version 450
#include "common.glsl"
PARAMS(OP_GLU)
OUT(0, float, y)
IN(1, float, gate)
IN(2, float, up)

void main() {
    FOR_THREADS(i, n_rows * n) {
        uint t = i / n, k = i % n;
        float g = gate[at[1] / 4 + t * ld_gate + k], u = up[at[2] / 4 + t * ld_up + k];
        g = clamp_gate > 0.0 && g > clamp_gate ? clamp_gate : g;
        u = clamp_up > 0.0 ? clamp(u, -clamp_up, clamp_up) : u;
        precise float cube = 0.044715 * g * g;
        precise float e = kind == 0 ? -g : kind == 1 ? -1.59576912 * fused(cube, g, g) : -1.702 * g;
        precise float v = divide(g, 1.0 + exact_exp(e)) * (kind == 2 ? u + 1.0 : u);
        y[at[0] / 4 + t * ld_y + k] = v;
    }
}
