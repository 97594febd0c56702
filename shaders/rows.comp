// y[i] = x[out_row[i]]
#version 450
#include "common.glsl"
PARAMS(OP_ROWS)
OUT(0, float, y)
IN(1, float, x)
IN(2, int, out_row)

void main() {
    FOR_THREADS(i, n_rows * n) y[at[0] / 4 + i] = x[at[1] / 4 + out_row[at[2] / 4 + i / n] * n + i % n];
}
