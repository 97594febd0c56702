// Rotates pairs of dimensions in place: a thread per pair.
#version 450
#include "common.glsl"
PARAMS(OP_ROPE)
OUT(0, float, x)
IN(1, float, rotary)

void main() {
    uint pairs = n_rot / 2;
    FOR_THREADS(i, n_rows * n_head * pairs) {
        uint k = i % pairs, head = i / pairs % n_head, t = i / pairs / n_head;
        uint a = at[0] / 4 + t * ld_x + head * head_dim + first + (pairing == 0 ? 2 * k : k);
        uint b = a + (pairing == 0 ? 1 : pairs);
        float c = rotary[at[1] / 4 + (t * pairs + k) * 2], s = rotary[at[1] / 4 + (t * pairs + k) * 2 + 1];
        s = inverse != 0 ? -s : s;
        float xa = x[a], xb = x[b];
        precise float bs = xb * s, bc = xb * c;
        x[a] = fused(xa, c, -bs);
        x[b] = fused(xa, s, bc);
    }
}
