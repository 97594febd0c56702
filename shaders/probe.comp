// Whether fma rounds once: y = fma(x[0], x[1], x[2]).
#version 450
#include "common.glsl"
PARAMS(OP_ADD)
OUT(0, float, y)
IN(1, float, x)

void main() {
    if (gl_GlobalInvocationID.x == 0)
        y[at[0] / 4] = fma(x[at[1] / 4], x[at[1] / 4 + 1], x[at[1] / 4 + 2]);
}
