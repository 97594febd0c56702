// quants.h: every weight format, decoded once, in the common subset of C++, CUDA and GLSL.
//
// A block is read through Q_BYTE(at, k), the byte k of the block at `at`, as an int. In C++ and CUDA `at` is a pointer.
// A GLSL shader defines Q_BYTE before it includes this file; there `at` is a byte offset into whatever Q_BYTE reads.
//
// A value is  scale * quant + offset.  Scale and offset belong to a sub-block of `sub` values:
//   blocks of 32     scale = d          offset = m (Q4_1, Q5_1), else nothing
//   blocks of 256    scale = d * sc     offset = -(dmin * mn) (Q2_K, Q4_K, Q5_K), else nothing
// with integers quant, sc and mn: what the integer products of all backends work on. Products and sums are rounded one
// by one, so that every language gives the same bits, except for denormals on a GPU that flushes them.
#ifndef ENGINE_QUANTS_H
#define ENGINE_QUANTS_H

// The table of formats: X(name, type id in a file, values per block, bytes per block, values per sub-block, kind of the
// activations that it multiplies with, whether values have an offset).
#define Q_FORMATS(X)                                                                                                   \
    X(F32, 0, 1, 4, 1, ACT_F32, 0)                                                                                     \
    X(F16, 1, 1, 2, 1, ACT_F32, 0)                                                                                     \
    X(Q4_0, 2, 32, 18, 32, ACT_Q8_32, 0)                                                                               \
    X(Q4_1, 3, 32, 20, 32, ACT_Q8_32, 1)                                                                               \
    X(Q5_0, 6, 32, 22, 32, ACT_Q8_32, 0)                                                                               \
    X(Q5_1, 7, 32, 24, 32, ACT_Q8_32, 1)                                                                               \
    X(Q8_0, 8, 32, 34, 32, ACT_Q8_32, 0)                                                                               \
    X(Q2_K, 10, 256, 84, 16, ACT_Q8_256, 1)                                                                            \
    X(Q3_K, 11, 256, 110, 16, ACT_Q8_256, 0)                                                                           \
    X(Q4_K, 12, 256, 144, 32, ACT_Q8_256, 1)                                                                           \
    X(Q5_K, 13, 256, 176, 32, ACT_Q8_256, 1)                                                                           \
    X(Q6_K, 14, 256, 210, 16, ACT_Q8_256, 0)                                                                           \
    X(IQ4_NL, 20, 32, 18, 32, ACT_Q8_32, 0)                                                                            \
    X(IQ4_XS, 23, 256, 136, 32, ACT_Q8_256, 0)                                                                         \
    X(BF16, 30, 1, 2, 1, ACT_F32, 0)                                                                                   \
    X(MXFP4, 39, 32, 17, 32, ACT_Q8_32, 0)

// The sixteen quants of the two formats with a table. MXFP4's are doubled to be integers; q_d is halved in return.
#define Q_IQ4_VALUES -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#define Q_MXFP4_VALUES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

// What differs between the languages. Q_EXACT marks a float whose computation must not be fused or reordered.
#if defined(GL_core_profile) // GLSL
#define q_uint uint
#define q_at uint
#define Q_FN
#define Q_TABLE(name, values) const int name[16] = int[16](values);
#define Q_FLOAT(bits) uintBitsToFloat(bits)
#define Q_MUL(a, b) ((a) * (b))
#define Q_ADD(a, b) ((a) + (b))
#define Q_EXACT precise
#define Q_TYPE(name, id, block, bytes, sub, act, mins) const int TYPE_##name = id;
Q_FORMATS(Q_TYPE)
const int ACT_F32 = 0;
const int ACT_Q8_32 = 1;
const int ACT_Q8_256 = 2;
#else
#include <stdint.h>
#include <string.h>
#define q_uint uint32_t
#define Q_EXACT
#ifndef Q_BYTE
#define q_at const unsigned char *
#define Q_BYTE(at, k) int((at)[k])
#endif
#if defined(__CUDACC__)
#define Q_FN static __device__ __forceinline__
#define Q_TABLE(name, values) static __constant__ const signed char name[16] = {values};
#define Q_FLOAT(bits) __uint_as_float(bits)
#define Q_MUL(a, b) __fmul_rn(a, b)
#define Q_ADD(a, b) __fadd_rn(a, b)
#else
#define Q_FN static inline
#define Q_TABLE(name, values) static const signed char name[16] = {values};
#define Q_FLOAT(bits) q_float(bits)
#define Q_MUL(a, b) ((a) * (b))
#define Q_ADD(a, b) ((a) + (b))
static inline float q_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
#endif
#define Q_TYPE(name, id, block, bytes, sub, act, mins) TYPE_##name = id,
enum quant_type { Q_FORMATS(Q_TYPE) };
enum { ACT_F32, ACT_Q8_32, ACT_Q8_256 }; // f32; int8 with a scale per 32; int8 with a scale per 256
#endif
#undef Q_TYPE

Q_TABLE(q_iq4_table, Q_IQ4_VALUES)
Q_TABLE(q_mxfp4_table, Q_MXFP4_VALUES)

// The table's columns for kernels that serve every format.
#define Q_BLOCK(name, id, block, bytes, sub, act, mins) (type == id ? block : 0) +
#define Q_BYTES(name, id, block, bytes, sub, act, mins) (type == id ? bytes : 0) +
#define Q_SUB(name, id, block, bytes, sub, act, mins) (type == id ? sub : 0) +
Q_FN int q_block(int type) { return Q_FORMATS(Q_BLOCK) 0; }
Q_FN int q_bytes(int type) { return Q_FORMATS(Q_BYTES) 0; }
Q_FN int q_sub(int type) { return Q_FORMATS(Q_SUB) 0; }
#undef Q_BLOCK
#undef Q_BYTES
#undef Q_SUB

// Reading.

Q_FN int q_s8(q_at at, int k) {
    int b = Q_BYTE(at, k);
    return b - 2 * (b & 128);
}

Q_FN q_uint q_u16(q_at at, int k) { return q_uint(Q_BYTE(at, k)) | q_uint(Q_BYTE(at, k + 1)) << 8; }

Q_FN q_uint q_u32(q_at at, int k) { return q_u16(at, k) | q_u16(at, k + 2) << 16; }

// IEEE half to float, exact. A signalling NaN becomes quiet, as the processors' own instructions do it.
Q_FN float q_half(q_uint h) {
    q_uint e = (h >> 10) & 31u;
    q_uint m = h & 0x3ffu;
    q_uint sign = (h & 0x8000u) << 16;
    if (e == 0u) // m * 2^-24
        return Q_MUL(float(m), sign != 0u ? -5.9604644775390625e-8f : 5.9604644775390625e-8f);
    if (e == 31u)
        return Q_FLOAT(sign | 0x7f800000u | m << 13 | (m != 0u ? 0x400000u : 0u));
    return Q_FLOAT(sign | (e + 112u) << 23 | m << 13);
}

// Half of an E8M0 scale: 2^(e - 128), denormal for e = 0 and 1; 255 is NaN.
Q_FN float q_e8m0_halved(int e) {
    if (e == 255)
        return Q_FLOAT(0x7fc00000u);
    return Q_FLOAT(e < 2 ? 0x200000u << e : q_uint(e - 1) << 23);
}

// Four bits of 32 values in 16 bytes from k on: value i in the low half of byte i, value i + 16 in its high half.
Q_FN int q_nibble(q_at at, int k, int i) { return (Q_BYTE(at, k + (i & 15)) >> ((i & 16) >> 2)) & 15; }

// Four bits of 64 values in 32 bytes, likewise.
Q_FN int q_nibble_k(q_at at, int k, int i) { return (Q_BYTE(at, k + i / 64 * 32 + (i & 31)) >> ((i & 32) >> 3)) & 15; }

// Two bits of 128 values in 32 bytes: value i in bits 2 * (i / 32) of byte i % 32.
Q_FN int q_two_bits(q_at at, int k, int i) { return (Q_BYTE(at, k + i / 128 * 32 + (i & 31)) >> ((i & 96) >> 4)) & 3; }

// One bit of 256 values in 32 bytes: value i in bit i / 32 of byte i % 32.
Q_FN int q_bit(q_at at, int k, int i) { return (Q_BYTE(at, k + (i & 31)) >> (i >> 5)) & 1; }

// The parts of a block. Layouts, offsets in bytes:
//   Q4_0     d 0, nibbles 2                     Q4_1   d 0, m 2, nibbles 4
//   Q5_0     d 0, fifth bits 2, nibbles 6       Q5_1   d 0, m 2, fifth bits 4, nibbles 8
//   Q8_0     d 0, int8 2
//   Q2_K     sc and mn, four bits each 0, two bits 16, d 80, dmin 82
//   Q3_K     third bits 0, two bits 32, sc 96 (16 of six bits), d 108
//   Q4_K     d 0, dmin 2, sc and mn 4 (8 of six bits each), nibbles 16
//   Q5_K     d 0, dmin 2, sc and mn 4, fifth bits 16, nibbles 48
//   Q6_K     nibbles 0, two bits 128, sc 192 (int8), d 208
//   IQ4_NL   d 0, nibbles 2                     MXFP4  E8M0 0, nibbles 1
//   IQ4_XS   d 0, sc 2 (upper two bits of 8) and 4 (lower four), nibbles 8

// Integer quant of value i of the block.
Q_FN int q_quant(int type, q_at at, int i) {
    switch (type) {
    case TYPE_Q4_0:
        return q_nibble(at, 2, i) - 8;
    case TYPE_Q4_1:
        return q_nibble(at, 4, i);
    case TYPE_Q5_0:
        return q_nibble(at, 6, i) + ((Q_BYTE(at, 2 + (i >> 3)) >> (i & 7)) & 1) * 16 - 16;
    case TYPE_Q5_1:
        return q_nibble(at, 8, i) + ((Q_BYTE(at, 4 + (i >> 3)) >> (i & 7)) & 1) * 16;
    case TYPE_Q8_0:
        return q_s8(at, 2 + i);
    case TYPE_Q2_K:
        return q_two_bits(at, 16, i);
    case TYPE_Q3_K:
        return q_two_bits(at, 32, i) + q_bit(at, 0, i) * 4 - 4;
    case TYPE_Q4_K:
        return q_nibble_k(at, 16, i);
    case TYPE_Q5_K:
        return q_nibble_k(at, 48, i) + q_bit(at, 16, i) * 16;
    case TYPE_Q6_K: // nibbles of 128 values in 64 bytes: values 64 apart share a byte
        return ((Q_BYTE(at, i / 128 * 64 + (i & 63)) >> ((i & 64) >> 4)) & 15) + q_two_bits(at, 128, i) * 16 - 32;
    case TYPE_IQ4_NL:
        return int(q_iq4_table[q_nibble(at, 2, i)]);
    case TYPE_IQ4_XS:
        return int(q_iq4_table[q_nibble(at, 8 + i / 32 * 16, i & 31)]);
    case TYPE_MXFP4:
        return int(q_mxfp4_table[q_nibble(at, 1, i)]);
    }
    return 0;
}

// Integer scale of sub-block s, 1 where a block has none.
Q_FN int q_sub_scale(int type, q_at at, int s) {
    switch (type) {
    case TYPE_Q2_K:
        return Q_BYTE(at, s) & 15;
    case TYPE_Q3_K: // four bits of 16 in 8 bytes, then two bits of 16 in 4 bytes
        return ((Q_BYTE(at, 96 + (s & 7)) >> ((s & 8) >> 1)) & 15) +
               ((Q_BYTE(at, 104 + (s & 3)) >> ((s & 12) >> 1)) & 3) * 16 - 32;
    case TYPE_Q4_K:
    case TYPE_Q5_K: // the first four in six bits of a byte; the others in four bits and two spare ones of the first
        return s < 4 ? Q_BYTE(at, 4 + s) & 63 : (Q_BYTE(at, 8 + s) & 15) + (Q_BYTE(at, s) >> 6) * 16;
    case TYPE_Q6_K:
        return q_s8(at, 192 + s);
    case TYPE_IQ4_XS:
        return ((Q_BYTE(at, 4 + (s >> 1)) >> ((s & 1) * 4)) & 15) +
               ((Q_BYTE(at, 2 + (s >> 2)) >> ((s & 3) * 2)) & 3) * 16 - 32;
    }
    return 1;
}

// Integer minimum of sub-block s, 0 where a block has none.
Q_FN int q_sub_min(int type, q_at at, int s) {
    switch (type) {
    case TYPE_Q2_K:
        return Q_BYTE(at, s) >> 4;
    case TYPE_Q4_K:
    case TYPE_Q5_K:
        return s < 4 ? Q_BYTE(at, 8 + s) & 63 : (Q_BYTE(at, 8 + s) >> 4) + (Q_BYTE(at, 4 + s) >> 6) * 16;
    }
    return 0;
}

// d of the block.
Q_FN float q_d(int type, q_at at) {
    switch (type) {
    case TYPE_Q2_K:
        return q_half(q_u16(at, 80));
    case TYPE_Q3_K:
        return q_half(q_u16(at, 108));
    case TYPE_Q6_K:
        return q_half(q_u16(at, 208));
    case TYPE_MXFP4:
        return q_e8m0_halved(Q_BYTE(at, 0));
    }
    return q_half(q_u16(at, 0));
}

// dmin of the block, the m of Q4_1 and Q5_1; 0 where a block has none.
Q_FN float q_dmin(int type, q_at at) {
    switch (type) {
    case TYPE_Q4_1:
    case TYPE_Q5_1:
    case TYPE_Q4_K:
    case TYPE_Q5_K:
        return q_half(q_u16(at, 2));
    case TYPE_Q2_K:
        return q_half(q_u16(at, 82));
    }
    return 0.0f;
}

// The floats that turn the quants of sub-block s into values.

Q_FN float q_scale(int type, q_at at, int s) {
    Q_EXACT float d = q_d(type, at);
    if (q_block(type) == 256)
        d = Q_MUL(d, float(q_sub_scale(type, at, s)));
    return d;
}

Q_FN float q_offset(int type, q_at at, int s) {
    switch (type) {
    case TYPE_Q4_1:
    case TYPE_Q5_1:
        return q_dmin(type, at);
    case TYPE_Q2_K:
    case TYPE_Q4_K:
    case TYPE_Q5_K:
        return -Q_MUL(q_dmin(type, at), float(q_sub_min(type, at, s)));
    }
    return -0.0f; // adding it changes no value, not even a -0
}

Q_FN float q_compose(float scale, int quant, float offset) {
    Q_EXACT float product = Q_MUL(scale, float(quant));
    Q_EXACT float value = Q_ADD(product, offset);
    return value;
}

// Value i of a block, in any format.
Q_FN float q_value(int type, q_at at, int i) {
    switch (type) {
    case TYPE_F32:
        return Q_FLOAT(q_u32(at, 4 * i));
    case TYPE_F16:
        return q_half(q_u16(at, 2 * i));
    case TYPE_BF16:
        return Q_FLOAT(q_u16(at, 2 * i) << 16);
    }
    int s = i / q_sub(type);
    return q_compose(q_scale(type, at, s), q_quant(type, at, i), q_offset(type, at, s));
}

#endif
