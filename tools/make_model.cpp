// make_model: writes a synthetic GGUF model with seeded random weights, in any shape and weight format that the engine
// reads. For speed measurements and tests: such a model computes as a real one does and says nothing sensible.
//
//     make_model OUT.gguf --preset llama-1.1b --type Q4_K_M
//     make_model OUT.gguf --arch qwen2 --layers 3 --embd 96 --heads 6 --kv-heads 2 --ffn 200 --vocab 400 --type Q8_0
//
// The same options give the same bytes. Every tensor has its own random stream, seeded with --seed and its name.
//
// Scale of the weights: n_in inputs of about unit size give outputs of about unit size (standard deviation 1 /
// sqrt(n_in)), the two matrices of a layer that add to the residual stream are smaller by sqrt(2 n_layer), logits have
// a deviation of about 3, norm weights are 1 ± 0.1, biases 0 ± 0.1. So activations stay near 1 over any number of
// layers; with norms after the branches each branch adds about unit size instead.
//
// Formats: F32, F16, BF16, and Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 come from random floats. The others (K-quants, IQ4_NL,
// IQ4_XS, MXFP4) are not quantized from anything: their quant bits are drawn directly, with block scales that give mean
// zero and the same deviation, so every bit pattern of a block occurs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <set>
#include <string>
#include <vector>

#include "../shaders/quants.h"
#include "../tests/gguf_writer.h"

namespace {

using std::string;
using std::vector;

[[noreturn]] void die(const string &message) {
    fprintf(stderr, "make_model: %s\n", message.c_str());
    exit(2);
}

// ---- random numbers ------------------------------------------------------------------------------------------------

// xoshiro256++, seeded with splitmix64.
struct random_stream {
    uint64_t s[4];

    random_stream(uint64_t seed, const string &name) {
        for (unsigned char c : name)
            seed = (seed ^ c) * 0x100000001b3u;
        for (uint64_t &word : s) {
            seed += 0x9e3779b97f4a7c15u;
            uint64_t z = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
            word = z ^ (z >> 31);
        }
    }
    static uint64_t rotate(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }
    uint64_t next() {
        uint64_t out = rotate(s[0] + s[3], 23) + s[0], t = s[1] << 17;
        s[2] ^= s[0], s[3] ^= s[1], s[1] ^= s[2], s[0] ^= s[3];
        s[2] ^= t, s[3] = rotate(s[3], 45);
        return out;
    }
    // [lo, hi]
    int range(int lo, int hi) { return lo + int((next() >> 32) * uint64_t(hi - lo + 1) >> 32); }
    float unit() { return float(next() >> 40) * 0x1p-24f; }
    // Mean 0, deviation 1, at most 3.46: the sum of four uniform 16-bit numbers, close enough to a normal one.
    float normal() {
        uint64_t r = next();
        int sum = int(r & 0xffff) + int((r >> 16) & 0xffff) + int((r >> 32) & 0xffff) + int(r >> 48);
        return float(sum - 131070) * float(1.0 / 37837.23);
    }
    void bytes(uint8_t *out, int n) {
        for (; n >= 8; n -= 8, out += 8) {
            uint64_t r = next();
            memcpy(out, &r, 8);
        }
        for (uint64_t r = n ? next() : 0; n-- > 0; r >>= 8)
            *out++ = uint8_t(r);
    }
};

// ---- weight formats ------------------------------------------------------------------------------------------------

// To the nearest integer, ties to even, for |x| < 2^22.
float nearest(float x) {
    const float big = 12582912.0f; // 1.5 * 2^23: sums with it have no fraction bits
    return x + big - big;
}

// Round to nearest even; the weights here are finite and far below 65504.
uint16_t to_half(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    uint32_t sign = (u >> 16) & 0x8000, mag = u & 0x7fffffff;
    if (mag < 0x38800000) { // a denormal half: a multiple of 2^-24
        float a = std::fabs(x) * 0x1p24f;
        return uint16_t(sign | uint32_t(nearest(a)));
    }
    return uint16_t(sign | ((mag + 0xfff + ((mag >> 13) & 1) - 0x38000000) >> 13));
}

void put_half(uint8_t *&p, float x) {
    uint16_t h = to_half(x);
    memcpy(p, &h, 2);
    p += 2;
}

void put_random(uint8_t *&p, int n, random_stream &r) { r.bytes(p, n), p += n; }

// One block of Q4_0, Q4_1, Q5_0, Q5_1 (bits 4 or 5; with a minimum or symmetric) or Q8_0 from 32 floats.
void quantize_block(uint8_t *p, const float *x, int bits, bool with_min) {
    float lo = x[0], hi = x[0];
    for (int i = 1; i < 32; i++)
        lo = std::min(lo, x[i]), hi = std::max(hi, x[i]);
    float big = -lo > hi ? lo : hi; // the value of largest magnitude
    if (bits == 8) {
        float d = std::fabs(big) / 127, inverse = d > 0 ? 1 / d : 0;
        put_half(p, d);
        for (int i = 0; i < 32; i++)
            p[i] = uint8_t(int8_t(int(nearest(x[i] * inverse))));
        return;
    }
    // The symmetric formats give the value of largest magnitude the code 0, which reaches one step further than the top
    // one.
    int top = (1 << bits) - 1, middle = 1 << (bits - 1);
    float d = with_min ? (hi - lo) / float(top) : big / float(-middle);
    float inverse = d != 0 ? 1 / d : 0, offset = with_min ? -lo * inverse : float(middle);
    put_half(p, d);
    if (with_min)
        put_half(p, lo);
    int code[32];
    for (int i = 0; i < 32; i++)
        code[i] = std::min(std::max(int(nearest(x[i] * inverse + offset)), 0), top);
    if (bits == 5) {
        uint32_t high = 0;
        for (int i = 0; i < 32; i++)
            high |= uint32_t(code[i] >> 4) << i;
        memcpy(p, &high, 4), p += 4;
    }
    for (int i = 0; i < 16; i++)
        p[i] = uint8_t((code[i] & 15) | (code[i + 16] & 15) << 4);
}

// The 12 bytes of eight 6-bit scales and eight 6-bit minimums of Q4_K and Q5_K. Minimums stay near their scales, so
// that a sub-block's mean is near zero.
void put_scales_and_mins(uint8_t *&p, random_stream &r) {
    int sc[8], mn[8];
    for (int i = 0; i < 8; i++)
        sc[i] = r.range(32, 63), mn[i] = std::min(63, sc[i] + r.range(-3, 3));
    for (int i = 0; i < 4; i++) {
        p[i] = uint8_t(sc[i] | (sc[i + 4] >> 4) << 6);
        p[i + 4] = uint8_t(mn[i] | (mn[i + 4] >> 4) << 6);
        p[i + 8] = uint8_t((sc[i + 4] & 15) | (mn[i + 4] & 15) << 4);
    }
    p += 12;
}

// One block with random quant bits and deviation sigma. The divisors are the deviations of the block's integers: of
// scale times quant under the distributions drawn here.
void random_block(uint8_t *p, int type, float sigma, random_stream &r) {
    float sign = r.next() & 1 ? 1.0f : -1.0f;
    float d;
    switch (type) {
    case TYPE_Q2_K: // w = d sc q - dmin mn; q of 0 … 3 has mean 1.5
        d = sigma / (11.73f * 1.118f);
        for (int i = 0; i < 16; i++) {
            int sc = r.range(8, 15);
            *p++ = uint8_t(sc | std::min(15, sc + r.range(-1, 1)) << 4);
        }
        put_random(p, 64, r);
        put_half(p, d), put_half(p, 1.5f * d);
        break;
    case TYPE_Q3_K: // w = d (sc - 32) (q - 4); all of its bytes but d may be anything
        put_random(p, 32 + 64 + 12, r);
        put_half(p, sign * sigma / (18.48f * 2.345f));
        break;
    case TYPE_Q4_K: // w = d sc q - dmin mn; q of 0 … 15 has mean 7.5
        d = sigma / (48.4f * 4.61f);
        put_half(p, d), put_half(p, 7.5f * d);
        put_scales_and_mins(p, r);
        put_random(p, 128, r);
        break;
    case TYPE_Q5_K: // the same with q of 0 … 31
        d = sigma / (48.4f * 9.233f);
        put_half(p, d), put_half(p, 15.5f * d);
        put_scales_and_mins(p, r);
        put_random(p, 32 + 128, r);
        break;
    case TYPE_Q6_K: // w = d sc (q - 32), sc of both signs
        put_random(p, 128 + 64, r);
        for (int i = 0; i < 16; i++) {
            int sc = r.range(64, 127);
            *p++ = uint8_t(int8_t(r.next() & 1 ? sc : -sc));
        }
        put_half(p, sign * sigma / (97.3f * 18.48f));
        break;
    case TYPE_IQ4_NL: // w = d table[q]
        put_half(p, sign * sigma / 69.6f);
        put_random(p, 16, r);
        break;
    case TYPE_IQ4_XS: // w = d (sc - 32) table[q]; sc is 4 low and 2 high bits
        put_half(p, sign * sigma / (18.48f * 69.6f));
        put_random(p, 2 + 4 + 128, r);
        break;
    case TYPE_MXFP4: { // w = 2^(e - 127) table[q]; e is one of two neighbours, mixed to the right mean square
        float s = sigma / 2.926f;
        int k = int(std::floor(std::log2(s)));
        float ratio = s / std::ldexp(1.0f, k);
        *p++ = uint8_t(127 + k + (r.unit() < (ratio * ratio - 1) / 3 ? 1 : 0));
        put_random(p, 16, r);
        break;
    }
    }
}

// The id of a format by its name, -1 when unknown.
int type_id(const string &name) {
#define TYPE_ROW(row, id, block, bytes, sub, act, mins)                                                                \
    if (name == #row)                                                                                                  \
        return id;
    Q_FORMATS(TYPE_ROW)
#undef TYPE_ROW
    return -1;
}

// The format for a matrix whose rows are no multiple of `type`'s block, as the usual quantizer chooses it.
int fallback(int type) {
    switch (type) {
    case TYPE_Q2_K:
    case TYPE_Q3_K:
    case TYPE_IQ4_XS:
        return TYPE_IQ4_NL;
    case TYPE_Q4_K:
        return TYPE_Q5_0;
    case TYPE_Q5_K:
        return TYPE_Q5_1;
    case TYPE_Q6_K:
        return TYPE_Q8_0;
    }
    return TYPE_F16;
}

// One row of n weights, a multiple of the format's block, with the given mean and deviation.
void random_row(uint8_t *p, int type, int64_t n, float mean, float sigma, random_stream &r) {
    float x[32];
    switch (type) {
    case TYPE_F32:
        for (int64_t i = 0; i < n; i++) {
            x[0] = mean + sigma * r.normal();
            memcpy(p + 4 * i, x, 4);
        }
        return;
    case TYPE_F16:
        for (int64_t i = 0; i < n; i++)
            put_half(p, mean + sigma * r.normal());
        return;
    case TYPE_BF16: // truncated: its upper half
        for (int64_t i = 0; i < n; i++) {
            x[0] = mean + sigma * r.normal();
            memcpy(p + 2 * i, reinterpret_cast<uint8_t *>(x) + 2, 2);
        }
        return;
    }
    int block = q_block(type), bytes = q_bytes(type);
    bool from_floats =
        type == TYPE_Q4_0 || type == TYPE_Q4_1 || type == TYPE_Q5_0 || type == TYPE_Q5_1 || type == TYPE_Q8_0;
    for (int64_t i = 0; i < n; i += block, p += bytes) {
        if (!from_floats) {
            random_block(p, type, sigma, r);
            continue;
        }
        for (float &v : x)
            v = sigma * r.normal();
        bool five = type == TYPE_Q5_0 || type == TYPE_Q5_1;
        quantize_block(p, x, type == TYPE_Q8_0 ? 8 : five ? 5 : 4, type == TYPE_Q4_1 || type == TYPE_Q5_1);
    }
}

// ---- the model -----------------------------------------------------------------------------------------------------

struct options {
    string arch = "llama", type = "Q8_0", name = "synthetic";
    int layers = 2, embd = 64, heads = 4, kv_heads = 2, head_dim = 0, ffn = 160, vocab = 320, ctx = 2048;
    int seed = 1;
    int window = 0, window_pattern = -1; // gemma3 only; a negative pattern is not written
    bool tied = false, bias = false, qk_norm = false, post_norm = false, pure = false, rope_factors = false;
    double rope_base = 10000, norm_eps = 1e-5;
    string rope_scaling; // "linear", "yarn"
    double rope_factor = 1;
    int rope_orig_ctx = 0;
};

struct tensor {
    string name;
    int type;
    vector<uint64_t> dims; // row length first
    float mean, sigma;
};

// What the usual quantizer chooses for a matrix when asked for `type`. Q4_K_M and Q5_K_M give more bits to the values
// and the down projection of the first and last eighth of the layers and of every third between; the output matrix gets
// Q6_K with all types below 6 bits.
int type_for(const options &o, const string &role, int layer) {
    string base = o.type;
    bool mix = base == "Q4_K_M" || base == "Q5_K_M";
    if (mix)
        base.resize(4);
    int type = type_id(base);
    if (type < 0)
        die("unknown --type " + o.type);
    bool low = type != TYPE_F32 && type != TYPE_F16 && type != TYPE_BF16 && type != TYPE_Q8_0;
    bool is_output = role == "output" || (role == "token_embd" && o.tied);
    if (is_output && low && !o.pure)
        return TYPE_Q6_K;
    int eighth = o.layers / 8;
    bool more = layer < eighth || layer >= 7 * o.layers / 8 || (layer - eighth) % 3 == 2;
    if (mix && more && (role == "attn_v" || role == "ffn_down"))
        return TYPE_Q6_K;
    return type;
}

vector<tensor> list_tensors(const options &o) {
    vector<tensor> out;
    auto matrix = [&](const string &prefix, const string &role, int layer, int n_in, int n_out, double gain) {
        int type = type_for(o, role, layer);
        while (n_in % q_block(type))
            type = fallback(type);
        out.push_back(
            {prefix + role + ".weight", type, {uint64_t(n_in), uint64_t(n_out)}, 0, float(gain / std::sqrt(n_in))});
    };
    auto vec = [&](const string &name, int n, float mean) {
        out.push_back({name, TYPE_F32, {uint64_t(n)}, mean, 0.1f});
    };

    int n_q = o.heads * o.head_dim, n_kv = o.kv_heads * o.head_dim;
    double to_residual = 1 / std::sqrt(2.0 * o.layers);
    matrix("", "token_embd", 0, o.embd, o.vocab, 3);
    if (o.rope_factors)
        out.push_back({"rope_freqs.weight", TYPE_F32, {uint64_t(o.head_dim / 2)}, 0, 0});
    for (int i = 0; i < o.layers; i++) {
        string blk = "blk." + std::to_string(i) + ".";
        vec(blk + "attn_norm.weight", o.embd, 1);
        matrix(blk, "attn_q", i, o.embd, n_q, 1);
        matrix(blk, "attn_k", i, o.embd, n_kv, 1);
        matrix(blk, "attn_v", i, o.embd, n_kv, 1);
        matrix(blk, "attn_output", i, n_q, o.embd, to_residual);
        if (o.bias) {
            vec(blk + "attn_q.bias", n_q, 0);
            vec(blk + "attn_k.bias", n_kv, 0);
            vec(blk + "attn_v.bias", n_kv, 0);
        }
        if (o.qk_norm) {
            vec(blk + "attn_q_norm.weight", o.head_dim, 1);
            vec(blk + "attn_k_norm.weight", o.head_dim, 1);
        }
        if (o.post_norm) {
            vec(blk + "post_attention_norm.weight", o.embd, 1);
            vec(blk + "post_ffw_norm.weight", o.embd, 1);
        }
        vec(blk + "ffn_norm.weight", o.embd, 1);
        matrix(blk, "ffn_gate", i, o.embd, o.ffn, 1);
        matrix(blk, "ffn_up", i, o.embd, o.ffn, 1);
        matrix(blk, "ffn_down", i, o.ffn, o.embd, to_residual);
    }
    vec("output_norm.weight", o.embd, 1);
    if (!o.tied)
        matrix("", "output", 0, o.embd, o.vocab, 3);
    return out;
}
// A byte-level BPE of o.vocab tokens: the 256 bytes, some merges of English letters, invented words that no text
// tokenizes to (so that random output looks like words), and at the end the ChatML markers.
struct tokenizer {
    vector<string> tokens, merges;
    vector<int32_t> types; // 1: normal, 3: control
    int end, im_start, im_end;
};

string utf8(int c) { return c < 0x80 ? string(1, char(c)) : string{char(0xc0 | c >> 6), char(0x80 | (c & 0x3f))}; }

tokenizer make_tokenizer(const options &o) {
    tokenizer t;
    std::set<string> seen;
    auto add = [&](const string &text, int type) {
        if (seen.insert(text).second)
            t.tokens.push_back(text), t.types.push_back(type);
    };
    // Printable bytes of Latin-1 stand for themselves, the other 68 for the characters from 256 on.
    for (int b = 0, moved = 256; b < 256; b++) {
        bool itself = (b > 32 && b < 127) || (b > 160 && b < 256 && b != 173);
        add(utf8(itself ? b : moved++), 1);
    }
    static const char *const merges[] = {"t h",      "i n",      "e r",      "a n",       "r e",  "o n",
                                         "e n",      "o r",      "i t",      "th e",      "an d", "in g",
                                         "\u0120 t", "\u0120 a", "\u0120 s", "\u0120 the"};
    const int room = o.vocab - 3; // what is left to normal tokens
    for (string merge : merges) {
        size_t gap = merge.find(' ');
        if (int(t.tokens.size()) == room)
            break;
        t.merges.push_back(merge);
        add(merge.erase(gap, 1), 1);
    }
    static const char *const syllables[] = {"ba", "de", "fi", "go", "ku", "la", "me", "ni",
                                            "po", "ru", "sa", "te", "vi", "wo", "zu", "ka"};
    for (int i = 16; int(t.tokens.size()) < room; i++) {
        string word = "\u0120";
        for (int rest = i; rest; rest /= 16)
            word += syllables[rest % 16];
        add(word, 1);
    }
    t.end = room, t.im_start = room + 1, t.im_end = room + 2;
    add("<|endoftext|>", 3), add("<|im_start|>", 3), add("<|im_end|>", 3);
    return t;
}

const char CHAT_TEMPLATE[] =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

void add_metadata(gguf_writer &w, const options &o) {
    const string a = o.arch + ".";
    w.add_string("general.architecture", o.arch);
    w.add_string("general.name", o.name);
    w.add_u32("general.quantization_version", 2);
    w.add_u32(a + "block_count", o.layers);
    w.add_u32(a + "context_length", o.ctx);
    w.add_u32(a + "embedding_length", o.embd);
    w.add_u32(a + "feed_forward_length", o.ffn);
    w.add_u32(a + "attention.head_count", o.heads);
    w.add_u32(a + "attention.head_count_kv", o.kv_heads);
    w.add_u32(a + "attention.key_length", o.head_dim);
    w.add_u32(a + "attention.value_length", o.head_dim);
    w.add_f32(a + "attention.layer_norm_rms_epsilon", float(o.norm_eps));
    w.add_f32(a + "rope.freq_base", float(o.rope_base));
    w.add_u32(a + "rope.dimension_count", o.head_dim);
    w.add_u32(a + "vocab_size", o.vocab);
    if (o.window > 0)
        w.add_u32(a + "attention.sliding_window", uint32_t(o.window));
    if (o.window_pattern >= 0)
        w.add_u32(a + "attention.sliding_window_pattern", uint32_t(o.window_pattern));
    if (!o.rope_scaling.empty()) {
        w.add_string(a + "rope.scaling.type", o.rope_scaling);
        w.add_f32(a + "rope.scaling.factor", float(o.rope_factor));
        if (o.rope_scaling == "yarn")
            w.add_u32(a + "rope.scaling.original_context_length", o.rope_orig_ctx ? o.rope_orig_ctx : o.ctx);
    }
    tokenizer t = make_tokenizer(o);
    w.add_string("tokenizer.ggml.model", "gpt2");
    w.add_string("tokenizer.ggml.pre", o.arch == "llama" ? "gpt-2" : "qwen2");
    w.add_strings("tokenizer.ggml.tokens", t.tokens);
    w.add_i32s("tokenizer.ggml.token_type", t.types);
    w.add_strings("tokenizer.ggml.merges", t.merges);
    w.add_u32("tokenizer.ggml.bos_token_id", t.end);
    w.add_u32("tokenizer.ggml.eos_token_id", t.im_end);
    w.add_u32("tokenizer.ggml.padding_token_id", t.end);
    w.add_bool("tokenizer.ggml.add_bos_token", false);
    w.add_string("tokenizer.chat_template", CHAT_TEMPLATE);
}

// Rows are made and written in pieces of about a megabyte.
void write_tensor(gguf_writer &w, const options &o, const tensor &t) {
    random_stream r(uint64_t(o.seed), t.name);
    uint64_t n = t.dims[0], rows = t.dims.size() > 1 ? t.dims[1] : 1;
    uint64_t row_bytes = n / q_block(t.type) * q_bytes(t.type);
    vector<uint8_t> piece(row_bytes * std::max<uint64_t>(1, (1 << 20) / row_bytes));
    if (t.name == "rope_freqs.weight") { // the shape of Llama 3's: fast rotations as they are, slow ones divided by 8
        vector<float> factors;
        for (uint64_t i = 0; i < n; i++)
            factors.push_back(float(std::fmin(std::fmax(16.0 * double(i) / double(n) - 7.0, 1.0), 8.0)));
        w.write(factors.data(), 4 * n);
        return;
    }
    for (uint64_t row = 0; row < rows;) {
        uint64_t some = std::min(rows - row, piece.size() / row_bytes);
        for (uint64_t i = 0; i < some; i++)
            random_row(piece.data() + i * row_bytes, t.type, int64_t(n), t.mean, t.sigma, r);
        w.write(piece.data(), some * row_bytes);
        row += some;
    }
}

// ---- the command ---------------------------------------------------------------------------------------------------

const char USAGE[] =
    "usage: make_model OUT.gguf [options]\n"
    "  --preset NAME      llama-1.1b, qwen3-0.6b, gemma3-1b, gemma3-tiny, or tiny (the default); the other options\n"
    "                     change it\n"
    "  --arch NAME        llama, qwen2 (biases), qwen3 (QK-norm) or gemma3 (QK-norm, norms after the branches, tied,\n"
    "                     window layers)\n"
    "  --type NAME        F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4, or the\n"
    "                     mixes Q4_K_M and Q5_K_M\n"
    "  --pure             that format for the output matrix too, which otherwise gets Q6_K\n"
    "  --layers --embd --heads --kv-heads --head-dim --ffn --vocab --ctx N\n"
    "  --tied             no output matrix: the embedding serves\n"
    "  --bias, --qk-norm  add these tensors whatever the architecture\n"
    "  --window N         tokens that window layers see; --window-pattern N: every Nth layer sees all, 0: none does\n"
    "  --rope-base X      --rope-scaling linear|yarn with --rope-factor X and --rope-orig-ctx N; --rope-factors adds\n"
    "                     a table of Llama 3's kind\n"
    "  --norm-eps X       --seed N   --name TEXT\n";

void set_arch(options &o, const string &arch) {
    if (arch != "llama" && arch != "qwen2" && arch != "qwen3" && arch != "gemma3")
        die("unknown --arch " + arch);
    o.arch = arch;
    o.bias = arch == "qwen2", o.qk_norm = arch == "qwen3" || arch == "gemma3";
    if (arch == "gemma3")
        o.post_norm = o.tied = true, o.rope_base = 1e6, o.norm_eps = 1e-6, o.window = 32;
}

void set_preset(options &o, const string &name) {
    o = options();
    o.name = name;
    if (name == "llama-1.1b") {
        o.layers = 22, o.embd = 2048, o.heads = 32, o.kv_heads = 4, o.ffn = 5632, o.vocab = 32000, o.ctx = 32768;
    } else if (name == "qwen3-0.6b") {
        set_arch(o, "qwen3");
        o.layers = 28, o.embd = 1024, o.heads = 16, o.kv_heads = 8, o.head_dim = 128, o.ffn = 3072, o.vocab = 151936;
        o.ctx = 40960, o.tied = true, o.rope_base = 1e6, o.norm_eps = 1e-6;
    } else if (name == "gemma3-tiny") { // every sixth layer sees all: one of these
        set_arch(o, "gemma3");
        o.layers = 7, o.embd = 96, o.head_dim = 32, o.ffn = 200, o.type = "F32";
    } else if (name == "gemma3-1b") {
        set_arch(o, "gemma3");
        o.layers = 26, o.embd = 1152, o.heads = 4, o.kv_heads = 1, o.head_dim = 256, o.ffn = 6912, o.vocab = 262144;
        o.ctx = 32768, o.window = 512;
    } else if (name != "tiny")
        die("unknown --preset " + name);
}

options parse(int argc, char **argv, string &out) {
    options o;
    // What other options change comes first, wherever it stands.
    set_preset(o, "tiny");
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], "--preset"))
            set_preset(o, argv[i + 1]);
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], "--arch"))
            set_arch(o, argv[i + 1]);
    for (int i = 1; i < argc; i++) {
        const string arg = argv[i];
        struct {
            const char *name;
            int *value;
        } ints[] = {{"--layers", &o.layers},     {"--embd", &o.embd},
                    {"--heads", &o.heads},       {"--kv-heads", &o.kv_heads},
                    {"--head-dim", &o.head_dim}, {"--ffn", &o.ffn},
                    {"--vocab", &o.vocab},       {"--ctx", &o.ctx},
                    {"--seed", &o.seed},         {"--rope-orig-ctx", &o.rope_orig_ctx},
                    {"--window", &o.window},     {"--window-pattern", &o.window_pattern}};
        struct {
            const char *name;
            double *value;
        } reals[] = {{"--rope-base", &o.rope_base}, {"--rope-factor", &o.rope_factor}, {"--norm-eps", &o.norm_eps}};
        struct {
            const char *name;
            bool *value;
        } flags[] = {{"--tied", &o.tied},
                     {"--bias", &o.bias},
                     {"--qk-norm", &o.qk_norm},
                     {"--pure", &o.pure},
                     {"--rope-factors", &o.rope_factors}};
        auto next = [&]() -> string {
            if (i + 1 >= argc)
                die(arg + " needs a value");
            return argv[++i];
        };
        auto number = [&]() {
            string text = next();
            char *end;
            double v = strtod(text.c_str(), &end);
            if (text.empty() || *end)
                die(arg + ": not a number: " + text);
            return v;
        };
        bool known = false;
        for (auto &option : ints)
            if (arg == option.name) {
                double v = number();
                if (v < 0 || v > 1 << 30 || v != std::floor(v))
                    die(arg + ": out of range");
                *option.value = int(v), known = true;
            }
        for (auto &option : reals)
            if (arg == option.name)
                *option.value = number(), known = true;
        for (auto &flag : flags)
            if (arg == flag.name)
                *flag.value = known = true;
        if (known)
            continue;
        if (arg == "--help" || arg == "-h") {
            fputs(USAGE, stdout);
            exit(0);
        }
        if (arg == "--preset" || arg == "--arch") // done before
            next();
        else if (arg == "--type")
            o.type = next();
        else if (arg == "--name")
            o.name = next();
        else if (arg == "--rope-scaling")
            o.rope_scaling = next();
        else if (arg[0] == '-' || !out.empty())
            die("unknown argument " + arg + "\n" + USAGE);
        else
            out = arg;
    }
    if (out.empty())
        die(string("no output file\n") + USAGE);
    if (o.layers < 1 || o.embd < 1 || o.heads < 1 || o.kv_heads < 1 || o.ffn < 1 || o.ctx < 1)
        die("a size is zero");
    if (!o.head_dim)
        o.head_dim = o.embd / o.heads;
    if (o.head_dim < 2 || o.head_dim % 2)
        die("the head dimension must be even");
    if (o.heads % o.kv_heads)
        die("--heads must be a multiple of --kv-heads");
    if (o.vocab < 256 + 3)
        die("--vocab must be at least 259: the bytes and three markers");
    if (!o.rope_scaling.empty() && o.rope_scaling != "linear" && o.rope_scaling != "yarn")
        die("unknown --rope-scaling " + o.rope_scaling);
    return o;
}

} // namespace

int main(int argc, char **argv) {
    string path;
    const options o = parse(argc, argv, path);
    const vector<tensor> tensors = list_tensors(o);
    try {
        gguf_writer w(path);
        add_metadata(w, o);
        for (const tensor &t : tensors)
            w.add_tensor(t.name, uint32_t(t.type), t.dims);
        w.begin();
        for (const tensor &t : tensors)
            write_tensor(w, o, t);
        w.finish();
    } catch (const std::exception &e) {
        fprintf(stderr, "make_model: %s\n", e.what());
        return 1;
    }
    return 0;
}
