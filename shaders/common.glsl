// common.glsl: what every shader includes first.
//
// A shader declares its operands as bindings 0, 1, ... in the order of backend.h, and its push constants with PARAMS: the
// operation's own from ops.h, then at[i], the byte of binding i at which operand i begins (a binding's start is aligned,
// an operand's need not be), then what the operation adds. Buffers are read as 32-bit words, which every device can.
// Nothing depends on the size of a subgroup.
#include "ops.h"
#define OP_I(name) int name;
#define OP_F(name) float name;
#define PARAMS(LIST)                                                                                                   \
    layout(push_constant) uniform params {                                                                             \
        LIST(OP_I, OP_F)                                                                                               \
        uint at[7];                                                                                                    \
        uint extra[7];                                                                                                 \
    };
#define IN(i, type, name) layout(std430, binding = i) readonly buffer in_##i { type name[]; };
#define OUT(i, type, name) layout(std430, binding = i) buffer out_##i { type name[]; };

// Every device has workgroups of 128. Grids are limited, so shaders go on to item + number of groups.
layout(local_size_x = 128) in;
const uint THREADS = 128;
#define thread gl_LocalInvocationID.x
#define FOR_GROUPS(i, n) for (uint i = gl_WorkGroupID.x; i < uint(n); i += gl_NumWorkGroups.x)
#define FOR_THREADS(i, n)                                                                                              \
    for (uint i = gl_GlobalInvocationID.x; i < uint(n); i += gl_NumWorkGroups.x * THREADS)

#define NOT_A_NUMBER uintBitsToFloat(0x7fc00000u)

// Arithmetic with the CPU backend's bits. `precise` keeps a compiler from fusing what is not fused there.

// Whether fma rounds once, which Vulkan does not promise. Where it rounds twice it is put together from rounding errors.
layout(constant_id = 3) const bool FUSED = true;

float fused(float a, float b, float c) {
    if (FUSED)
        return fma(a, b, c);
    precise float p = a * b, s = p + c;
    if (!(abs(s) < 1e30 && abs(p) < 1e30 && abs(a) < 1e30 && abs(b) < 1e30))
        return s;
    precise float ca = a * 4097.0, cb = b * 4097.0;
    precise float ah = ca - (ca - a), bh = cb - (cb - b), al = a - ah, bl = b - bh;
    precise float e = ((ah * bh - p) + ah * bl + al * bh) + al * bl; // a * b = p + e
    precise float v = s - p;
    precise float t = (p - (s - v)) + (c - v); // p + c = s + t
    precise float r = s + (t + e);
    return r;
}

// A device's own division and root may be off by some units: one more step makes them right.
float divide(float a, float b) {
    precise float q = a / b;
    float r = fused(-q, b, a);
    return r == 0.0 || !(abs(q) < 1e30) ? q : fused(r, 1.0 / b, q);
}

float root(float x) {
    precise float s = sqrt(x);
    float r = fused(-s, s, x);
    return r == 0.0 || !(s > 0.0) ? s : fused(r, 0.5 / s, s);
}

// A result of NaN stays NaN.
float exact_exp(float x) {
    x = x > 89.0 ? 89.0 : x;
    x = x < -105.0 ? -105.0 : x;
    precise float shifted = fused(x, 1.44269504, 12582912.0);
    precise float n = shifted - 12582912.0;
    float r = fused(n, 1.90465421e-09, fused(n, -0.693147182, x));
    float p = fused(r, 1.39269268e-3, 8.36377405e-3);
    p = fused(r, p, 4.16665487e-2);
    p = fused(r, p, 0.166665733);
    p = fused(r, p, 0.5);
    precise float square = r * r, e = fused(square, p, r) + 1.0;
    int whole = int(n), part = whole >> 1;
    precise float y = e * uintBitsToFloat(uint(part + 127) << 23) * uintBitsToFloat(uint(whole - part + 127) << 23);
    return y;
}

float exact_tanh(float x) {
    precise float a = abs(x), z = x * x;
    float p = fused(z, -6.09670812e-3, 2.09971741e-2);
    p = fused(z, p, -5.38509078e-2);
    p = fused(z, p, 0.133327693);
    p = fused(z, p, -0.333333284);
    precise float small = x * fused(z, p, 1.0);
    precise float large = 1.0 - divide(2.0, exact_exp(a + a) + 1.0);
    return a <= 0.625 ? small : (x < 0.0 ? -large : large);
}

// a / b rounded to nearest even in integers, for positive normal numbers with a normal result: scales of quants must not
// depend on anything.
float exact_div(float a, float b) {
    uint ua = floatBitsToUint(a), ub = floatBitsToUint(b);
    uint ma = (ua & 0x7fffffu) | 0x800000u, mb = (ub & 0x7fffffu) | 0x800000u;
    uint e = (ua >> 23) - (ub >> 23) + 127u;
    if (ma < mb) {
        ma <<= 1;
        e--;
    }
    uint q = 1u, r = ma - mb;
    for (int i = 0; i < 23; i++) {
        r <<= 1;
        q <<= 1;
        if (r >= mb) {
            r -= mb;
            q |= 1u;
        }
    }
    if (2u * r > mb || (2u * r == mb && (q & 1u) != 0u))
        q++;
    return uintBitsToFloat((e << 23) + q - 0x800000u);
}

// Nearest even; packHalf2x16 may round as it likes.
uint to_half(float f) {
    uint u = floatBitsToUint(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return sign | 0x7e00u | ((a >> 13) & 0x3ffu);
    if (a >= 0x477ff000u)
        return sign | 0x7c00u;
    if (a < 0x33000000u)
        return sign;
    bool denormal = a < 0x38800000u;
    uint m = denormal ? (a & 0x7fffffu) | 0x800000u : a - (112u << 23);
    uint shift = denormal ? 126u - (a >> 23) : 13u;
    uint r = m >> shift, rest = m & ((1u << shift) - 1u), middle = 1u << (shift - 1u);
    return sign | (r + uint(rest > middle || (rest == middle && (r & 1u) != 0u)));
}

// amax as bits: larger than any number for infinity and NaN.
uint magnitude(float x) { return floatBitsToUint(x) & 0x7fffffffu; }
const uint INFINITE = 0x7f800000u;
