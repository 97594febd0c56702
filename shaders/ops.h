// ops.h: the parameters of every operation, once, for C++, CUDA and GLSL.
//
// Each list is OP_<NAME>(I, F): I(name) is a 4-byte signed integer, F(name) a 4-byte float. A list becomes the
// argument struct of the backend table (backend.h), the parameter of a CUDA kernel, and a Vulkan push-constant
// block, byte for byte the same; so at most 32 scalars each. Parameters never hold a position, a token or a
// cache length: operations read those from the step block.
//
// "rows" are the T tokens of a step. `ld_*` is the distance between rows of an operand, in elements.
#ifndef ENGINE_OPS_H
#define ENGINE_OPS_H
// clang-format off

// y[t] = scale * W[token[t]]
//   y [n_rows, n]
#define OP_EMBED(I, F) I(n_rows) I(n) I(type) F(scale)

// y[i] = x[out_row[i]]: the rows whose logits are wanted
//   x [*, n]  y [n_rows, n]
#define OP_ROWS(I, F) I(n_rows) I(n)

// y = x / sqrt(mean(x^2) + eps) * (weight_kind: 0 nothing, 1 w, 2 1 + w), over each of n_part parts of a row
//   x [n_rows, n_part, n]  w [n]
#define OP_NORM(I, F) I(n_rows) I(n_part) I(n) I(ld_x) I(ld_y) I(weight_kind) F(eps)

// y (+)= W x (+ bias); with n_group > 1 block-diagonal: group g maps x[g * n_in ...] to y[g * n_out ...]
//   W [n_group * n_out, n_in]  x [n_rows, n_group * n_in]  y [n_rows, n_group * n_out]
#define OP_MATMUL(I, F) I(n_rows) I(n_in) I(n_out) I(n_group) I(type) I(ld_x) I(ld_y) I(accumulate) I(has_bias)

// Experts: y[t][s] = W[id[t][s]] x[t] (x_per_slot: x[t][s]), with a per-expert bias
//   W [n_expert, n_out, n_in]  id [n_rows, n_slot]  y [n_rows, n_slot, n_out]
#define OP_MATMUL_ID(I, F) I(n_rows) I(n_slot) I(n_in) I(n_out) I(n_expert) I(type) I(x_per_slot) I(has_bias)

// Rotates n_rot dimensions from `first` on in each head, in place. pairing: 0 interleaved (2i, 2i + 1), 1 halves
// (i, i + n_rot/2). inverse: rotate back. table: which of the step block's cos/sin tables.
//   x [n_rows, n_head, head_dim]
#define OP_ROPE(I, F) I(n_rows) I(n_head) I(head_dim) I(first) I(n_rot) I(pairing) I(inverse) I(table) I(ld_x)

// Stores key and value rows into the pages of their sequence. shared: the value is a prefix of the key and is not
// stored (MLA, DeepSeek-V4).
//   k [n_rows, n_head_kv, dim_k]  v [n_rows, n_head_kv, dim_v]
#define OP_KV_PUT(I, F) I(n_rows) I(n_head_kv) I(dim_k) I(dim_v) I(type) I(shared) I(ld_k) I(ld_v)

// Softmax attention over one or two segments of cached rows (struct seg). A row of segment 0 at position p is seen from
// pos when p <= pos and (window == 0 or p > pos - window); an entry j of segment 1 with ratio r when j < (pos + 1) / r.
// softcap: l = cap * tanh(l / cap) when > 0. has_sinks: exp(sink[h]) joins the denominator. bucket: a power of two not
// below the longest sequence; it sizes grids, never a result.
//   q [n_rows, n_head, dim_k]  y [n_rows, n_head, dim_v]  sink [n_head]
#define OP_ATTEND(I, F)                                                                                                \
    I(n_rows) I(n_head) I(n_head_kv) I(dim_k) I(dim_v) I(n_seg) I(window) I(has_sinks) I(shared) I(bucket) I(ld_q)     \
    I(ld_y) F(scale) F(softcap)

// y = act(gate) * up. kind: 0 silu, 1 gelu (tanh form), 2 the clamped (up + 1) * gate * sigmoid(1.702 gate)
// clamp_gate, clamp_up: limits when > 0 (gate from above, up on both sides)
//   gate, up, y [n_rows, n]
#define OP_GLU(I, F) I(n_rows) I(n) I(kind) I(ld_gate) I(ld_up) I(ld_y) F(clamp_gate) F(clamp_up)

// y += x
//   x, y [n_rows, n]
#define OP_ADD(I, F) I(n_rows) I(n)

// y = s * x, softcapped when cap > 0; with a gate operand y = sigmoid(gate[t]) * x
//   x, y [n_rows, n]  gate [n_rows]
#define OP_SCALE(I, F) I(n_rows) I(n) I(has_gate) F(s) F(cap)

// Router scores to expert ids and weights. scoring: 0 softmax, 1 sigmoid, 2 sqrt(softplus), 3 table: id = table[token].
// normalise: weights divided by their sum. The bias counts for the choice only. n_group, n_group_used: group-limited.
//   score [n_rows, n_expert]  id, weight [n_rows, n_slot]
#define OP_ROUTE(I, F)                                                                                                 \
    I(n_rows) I(n_expert) I(n_slot) I(scoring) I(normalise) I(has_bias) I(n_group) I(n_group_used) F(scale)

// y[t] (+)= sum over slots, in slot order, of weight[t][s] * x[t][s]
//   x [n_rows, n_slot, n]
#define OP_MIX(I, F) I(n_rows) I(n_slot) I(n) I(accumulate)

// The k largest scores of each row, as ascending ids, ties to the lowest
//   score [n_rows, ld]  id [n_rows, k]
#define OP_TOPK(I, F) I(n_rows) I(k) I(ratio) I(ld) I(bucket)

// DeepSeek-V4, spec section numbers in parentheses.
// pool (9): pushes rows into a compressor and emits an entry for every `ratio` tokens, pooled over coff * ratio rows
#define OP_POOL(I, F) I(n_rows) I(dim) I(ratio) I(coff) I(first_rot) I(n_rot) I(table) I(type) F(eps)
// index (10): lightning-indexer scores of compressed entries
//   q [n_rows, n_head, dim]  weight [n_rows, n_head]
#define OP_INDEX(I, F) I(n_rows) I(n_head) I(dim) I(ratio) I(type) I(ld) I(bucket) F(scale)
// requant (4): rounds values through a narrower format in place, blocks of `block`, optionally after a Hadamard rotation
#define OP_REQUANT(I, F) I(n_rows) I(n) I(first) I(block) I(type) I(hadamard) I(ld_x)
// hc_split (6): mixing coefficients of the streams: pre, post, comb by Sinkhorn iterations
#define OP_HC_SPLIT(I, F) I(n_rows) I(n_stream) I(n_iter) F(eps)
// hc_pre (6.5): u = sum_i pre_i S_i
//   S [n_rows, n_stream, n]
#define OP_HC_PRE(I, F) I(n_rows) I(n_stream) I(n)
// hc_post (6.6): S'_j = post_j y + sum_i comb[i][j] S_i
#define OP_HC_POST(I, F) I(n_rows) I(n_stream) I(n)

// clang-format on
#endif
