// y += x
#version 450
#include "common.glsl"
PARAMS(OP_ADD)
OUT(0, float, y)
IN(1, float, x)

void main() {
    FOR_THREADS(i, n_rows * n) y[at[0] / 4 + i] += x[at[1] / 4 + i];
}
