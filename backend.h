// backend.h: the wall. A model is written once, in chapter FORWARD of engine.cpp, as calls through this table; a
// backend (the CPU, later Vulkan and CUDA) fills the table. Operations return nothing: a backend keeps its first
// error, and `sync` reports it. An operation that a backend cannot do is a null slot.
#ifndef ENGINE_BACKEND_H
#define ENGINE_BACKEND_H

#include <stdint.h>

#include "shaders/ops.h"
#include "shaders/quants.h"

enum { PAGE_TOKENS = 128 }; // tokens per page of the KV cache

// Bytes on a device. For the CPU `handle` is an address.
struct mem {
    void *handle;
    uint64_t offset;
};

// A weight matrix, or a stack of n_mat of them (experts). Rows are contiguous, `row_bytes` apart.
struct mat {
    struct mem data; // [n_mat, n_out, n_in] in format `type` (shaders/quants.h)
    int32_t type;
    int32_t n_in, n_out, n_mat;
    uint64_t row_bytes, mat_bytes;
};

// Where one layer's keys and values lie inside the pages. Page i of the pool starts at i * page_bytes; in it the
// keys of KV head h are PAGE_TOKENS rows from k_offset + h * PAGE_TOKENS * k_row_bytes on, the values likewise.
// Token p of a sequence is row p % PAGE_TOKENS of page table[p / PAGE_TOKENS], in the step's page table number `table`.
// A row is dim values in format `type`, the last block filled up with zeros.
struct seg {
    struct mem pool;
    struct mem row_ids; // [n_rows, n_ids] entries chosen by topk; a null handle means all that are causal
    uint64_t page_bytes, k_offset, v_offset, k_row_bytes, v_row_bytes;
    int32_t type;  // format of the rows: TYPE_F16 or TYPE_Q8_0
    int32_t table; // which of the step's page tables
    int32_t ratio; // 1: a row per token; r: a compressed entry per r tokens
    int32_t n_ids;
};

// What changes from step to step, on the device; uploaded by `put` before the operations of a step.
struct step {
    struct mem token; // int32 [n_rows]
    struct mem pos;   // int32 [n_rows], position of each row in its sequence
    struct mem seq;   // int32 [n_rows], which page table it belongs to
    // int32 [n_seq, table_len], page ids: 0 of layers that see everything, 1 of window layers, where entries before the
    // window are not valid
    struct mem table[2];
    struct mem out_row; // int32 [n_out], rows whose logits are wanted
    // float [n_rows, n_rot / 2, 2]: cos and sin of each row's angles, computed in double on the host
    struct mem rotary[2];
    int32_t table_len;
};

#define OP_INT(name) int32_t name;
#define OP_FLOAT(name) float name;
#define OP_STRUCT(name, LIST)                                                                                          \
    struct name##_op {                                                                                                 \
        LIST(OP_INT, OP_FLOAT)                                                                                         \
    };                                                                                                                 \
    static_assert(sizeof(struct name##_op) <= 128, #name ": push constants hold 128 bytes");
OP_STRUCT(embed, OP_EMBED)
OP_STRUCT(rows, OP_ROWS)
OP_STRUCT(norm, OP_NORM)
OP_STRUCT(matmul, OP_MATMUL)
OP_STRUCT(matmul_id, OP_MATMUL_ID)
OP_STRUCT(rope, OP_ROPE)
OP_STRUCT(kv_put, OP_KV_PUT)
OP_STRUCT(attend, OP_ATTEND)
OP_STRUCT(glu, OP_GLU)
OP_STRUCT(add, OP_ADD)
OP_STRUCT(scale, OP_SCALE)
OP_STRUCT(route, OP_ROUTE)
OP_STRUCT(mix, OP_MIX)
OP_STRUCT(topk, OP_TOPK)
OP_STRUCT(pool, OP_POOL)
OP_STRUCT(index, OP_INDEX)
OP_STRUCT(requant, OP_REQUANT)
OP_STRUCT(hc_split, OP_HC_SPLIT)
OP_STRUCT(hc_pre, OP_HC_PRE)
OP_STRUCT(hc_post, OP_HC_POST)

struct backend; // each backend's own state

struct backend_ops {
    // Memory. alloc, grow and weights return a null handle when they fail. alloc gives zeros. grow makes an allocation
    // larger and keeps its content (moved perhaps; after a failure the old one is still there). weights makes mapped
    // file bytes usable, in place where the device can. put and get copy between host and device and copy on the
    // device, in order with the operations.
    struct mem (*alloc)(struct backend *, uint64_t bytes);
    struct mem (*grow)(struct backend *, struct mem, uint64_t old_bytes, uint64_t new_bytes);
    void (*free)(struct backend *, struct mem);
    struct mem (*weights)(struct backend *, const void *host, uint64_t bytes);
    void (*put)(struct backend *, struct mem to, const void *from, uint64_t bytes);
    void (*get)(struct backend *, void *to, struct mem from, uint64_t bytes);
    void (*copy)(struct backend *, struct mem to, struct mem from, uint64_t bytes);
    // Scratch of the operations' own: what one call needs at most (attend: for any sequences of up to n_tokens), and
    // making that much ready, so that no operation allocates; reserve returns nonzero when memory is short. allocated:
    // bytes of alloc, grow and reserve that are in use now; any thread may ask, while the others take turns.
    uint64_t (*matmul_scratch)(struct backend *, const struct matmul_op *, const struct mat *w);
    uint64_t (*attend_scratch)(struct backend *, const struct attend_op *, const struct seg *, int64_t n_tokens);
    int32_t (*reserve)(struct backend *, uint64_t bytes);
    uint64_t (*allocated)(struct backend *);
    // Waits; NULL, or the first error since the last sync, and whether it is a shortage of memory.
    const char *(*sync)(struct backend *, int32_t *no_memory);

    // Every model. Operands are written y first, then what is read.
    void (*embed)(struct backend *, const struct embed_op *, struct mem y, const struct mat *w, const struct step *);
    void (*rows)(struct backend *, const struct rows_op *, struct mem y, struct mem x, const struct step *);
    void (*norm)(struct backend *, const struct norm_op *, struct mem y, struct mem x, struct mem w);
    void (*matmul)(struct backend *, const struct matmul_op *, struct mem y, const struct mat *w, struct mem x,
                   struct mem bias);
    void (*matmul_id)(struct backend *, const struct matmul_id_op *, struct mem y, const struct mat *w, struct mem x,
                      struct mem id, struct mem bias);
    void (*rope)(struct backend *, const struct rope_op *, struct mem x, const struct step *);
    void (*kv_put)(struct backend *, const struct kv_put_op *, const struct seg *, struct mem k, struct mem v,
                   const struct step *);
    void (*attend)(struct backend *, const struct attend_op *, struct mem y, struct mem q, const struct seg seg[2],
                   struct mem sinks, const struct step *);
    void (*glu)(struct backend *, const struct glu_op *, struct mem y, struct mem gate, struct mem up);
    void (*add)(struct backend *, const struct add_op *, struct mem y, struct mem x);
    void (*scale)(struct backend *, const struct scale_op *, struct mem y, struct mem x, struct mem gate);
    void (*route)(struct backend *, const struct route_op *, struct mem id, struct mem weight, struct mem score,
                  struct mem bias, struct mem table, const struct step *);
    void (*mix)(struct backend *, const struct mix_op *, struct mem y, struct mem x, struct mem weight);
    void (*topk)(struct backend *, const struct topk_op *, struct mem id, struct mem score, const struct step *);

    // DeepSeek-V4.
    void (*pool)(struct backend *, const struct pool_op *, const struct seg *, struct mem state, struct mem kv,
                 struct mem gate, struct mem ape, struct mem w, const struct step *);
    void (*index)(struct backend *, const struct index_op *, struct mem score, struct mem q, struct mem weight,
                  const struct seg *, const struct step *);
    void (*requant)(struct backend *, const struct requant_op *, struct mem x);
    void (*hc_split)(struct backend *, const struct hc_split_op *, struct mem pre, struct mem post, struct mem comb,
                     struct mem m, struct mem base, struct mem scale);
    void (*hc_pre)(struct backend *, const struct hc_pre_op *, struct mem u, struct mem pre, struct mem s);
    void (*hc_post)(struct backend *, const struct hc_post_op *, struct mem s, struct mem post, struct mem comb,
                    struct mem y);
};

#endif
