/* engine.h: run a language model from a GGUF file.   MIT licence, see LICENSE.

   A model is opened once and shared; a session is one timeline of tokens on it:

       engine_model *model;  engine_session *session;  engine_error err;
       if (engine_open(&model, "model.gguf", NULL, &err) < 0) { fputs(err.msg, stderr); return 1; }
       engine_session_new(&session, model, NULL, &err);
       int n = engine_tokenize(model, text, len, ENGINE_ADD_BOS, ids, cap, &err);
       engine_sync(session, ids, n, &err);                       prefill, reusing what the session already holds
       engine_generate(session, &options, on_piece, NULL, &result, &err);

   CONVENTIONS
   1. Every function that can fail returns an int: 0 or a count on success, a negative ENGINE_E* on failure.
   2. The caller owns the engine_error and may pass NULL. `msg` names the file, field or number that matters;
      it is untouched on success.
   3. Option structs: the first field is the struct's size. Zero-initialise, then set `size = sizeof opt` (0 is
      taken as that too); every field at zero means its default. A NULL pointer means all defaults.
   4. Functions that return text or tokens follow snprintf: at most `cap` items are written, the return value is
      how many there are in all. Text is not counted with its terminating NUL, which is written when cap > 0.
      `len` of an input text may be (size_t)-1: then it ends at its NUL.
   5. Callbacks run on the calling thread, inside the call, and stop the work by returning nonzero. They may ask a model
      for anything, but not compute on or change the session that called them (ENGINE_EINVAL).
   6. A model may be used by many threads at once. A session belongs to one thread at a time, except for
      engine_cancel, which any thread may call at any time. The threads that compute belong to the model and serve one
      chunk of one call at a time: calls on several sessions of a model take turns under one lock, chunk by chunk.
      A model does not survive fork().
   7. The library never prints, exits or aborts. What it has to say goes to engine_set_log's callback.
   8. The same tokens give the same bits: logits do not depend on how a prompt was cut into calls or chunks, on the
      number of threads, on what was rewound, reused, saved or loaded before, nor on which other sessions' rows were
      computed beside them. They do depend on the type of the cache rows (engine_session_options.kv). */
#ifndef ENGINE_H
#define ENGINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ENGINE_API __attribute__((visibility("default")))
#else
#define ENGINE_API
#endif

#define ENGINE_VERSION "0.1.0"

/* ---- errors -------------------------------------------------------------------------------------------------- */

enum {
    ENGINE_OK = 0,
    ENGINE_EINVAL = -1,       /* an argument is out of its range */
    ENGINE_EIO = -2,          /* a file cannot be opened, mapped or read */
    ENGINE_EFORMAT = -3,      /* a file's content is wrong */
    ENGINE_EUNSUPPORTED = -4, /* well-formed, but something that this build does not do; the message names it */
    ENGINE_ENOMEM = -5,       /* memory or threads */
    ENGINE_ECONTEXT = -6,     /* the tokens exceed the session's context size; nothing was evaluated */
    ENGINE_ECANCELLED = -7,   /* engine_cancel, or a callback that returned nonzero */
    ENGINE_ENUMERIC = -8,     /* the model produced logits that are not finite */
    ENGINE_ETEMPLATE = -9,    /* the chat template refused or failed; the message has its words and its line */
    ENGINE_EINTERNAL = -10    /* a bug here */
};

typedef struct engine_error {
    int code;
    char msg[256]; /* NUL-terminated */
} engine_error;

enum { ENGINE_LOG_INFO = 0, ENGINE_LOG_WARN = 1 };
typedef void (*engine_log_fn)(void *user, int level, const char *text);

/* Sets the process-wide log callback (NULL: none). `text` has no newline. Calls may come from any thread that is
   inside the library. */
ENGINE_API void engine_set_log(engine_log_fn fn, void *user);

/* "0.1.0" */
ENGINE_API const char *engine_version(void);

/* What this build can run on here, best first, one per line: "cpu avx512" means the CPU with its AVX-512 kernels. */
ENGINE_API int engine_backends(char *out, size_t cap);

/* ---- models -------------------------------------------------------------------------------------------------- */

typedef struct engine_model engine_model;

typedef struct engine_open_options {
    size_t size;
    int threads;        /* 1 to 512; 0: one per core that this process may use */
    int no_mmap;        /* nonzero: read the file into memory instead of mapping it */
    const char *device; /* NULL or "cpu"; "vulkan": the best GPU; "vulkan NAME": the device whose name contains NAME */
} engine_open_options;

/* Opens a GGUF file. For a split model name its first part; the others are found beside it. The file must stay
   unchanged while the model is open; `path` is needed during the call only. *out is NULL on failure. */
ENGINE_API int engine_open(engine_model **out, const char *path, const engine_open_options *opt, engine_error *err);

/* Frees a model. All its sessions must have been freed. NULL is allowed. */
ENGINE_API void engine_close(engine_model *model);

typedef struct engine_model_info {
    size_t size;            /* set by the caller */
    char name[128];         /* general.name, or the file's name */
    char arch[32];          /* general.architecture */
    char tokenizer[32];     /* "spm", or "bpe" and the pre-tokenizer: "bpe qwen2" */
    char types[128];        /* formats of the weights by share of bytes: "Q4_K 61% Q6_K 38% F32 1%" */
    char backend[32];       /* "cpu avx512" */
    char generic_ops[128];  /* operations that run on a generic, slow path for this model; "" when none */
    int64_t n_params;       /* weights */
    int64_t weight_bytes;   /* bytes of tensor data in the file */
    int64_t decode_bytes;   /* bytes of weights that one decode step reads */
    int64_t kv_token_bytes; /* bytes of KV cache per token, in f16 rows */
    int n_vocab, n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff;
    int n_ctx_train; /* tokens, the context that the model was trained for */
    int threads;
    int has_template; /* nonzero: the file carries a chat template */
    int32_t bos, eos; /* -1: none */
    int add_bos;      /* nonzero: the model expects ENGINE_ADD_BOS to add one */
    int64_t
        allocated_bytes; /* what the backend has allocated now: cache pages, work space, scratch (see engine_plan) */
    int n_window;        /* tokens that the model's window layers see; 0: all its layers see everything */
} engine_model_info;

/* Fills *info up to info->size. */
ENGINE_API int engine_info(const engine_model *model, engine_model_info *info, engine_error *err);

/* The file's metadata: the value of `key` as text (arrays as "[n items]"), following snprintf; ENGINE_EINVAL when there
   is no such key. With key NULL: all keys, one per line, as "key = value". */
ENGINE_API int engine_meta(const engine_model *model, const char *key, char *out, size_t cap, engine_error *err);

/* ---- text ---------------------------------------------------------------------------------------------------- */

enum {
    ENGINE_ADD_BOS = 1,      /* put BOS first (and EOS last), if the model wants them */
    ENGINE_PARSE_SPECIAL = 2 /* read special tokens such as <|im_end|> in the text; otherwise they are plain text */
};

/* Bytes to ids. Any bytes are allowed; those that are no valid UTF-8 become byte tokens. Returns the number of ids. */
ENGINE_API int engine_tokenize(const engine_model *model, const char *text, size_t len, int flags, int32_t *ids,
                               size_t cap, engine_error *err);

/* The raw bytes of one token, which may be a part of a character; following snprintf. Control tokens have none,
   unless `special` is nonzero. */
ENGINE_API int engine_piece(const engine_model *model, int32_t id, int special, char *out, size_t cap,
                            engine_error *err);

/* Ids to text: the inverse of engine_tokenize without BOS. Incomplete or invalid UTF-8 becomes U+FFFD. Control tokens
   are left out unless `special` is nonzero. */
ENGINE_API int engine_detokenize(const engine_model *model, const int32_t *ids, size_t n, int special, char *out,
                                 size_t cap, engine_error *err);

/* 1 if a model ends its turn with this token (EOS, end-of-turn), else 0. */
ENGINE_API int engine_token_is_end(const engine_model *model, int32_t id);

typedef struct engine_message {
    const char *role;    /* "system", "user", "assistant" or another that the template knows */
    const char *content; /* NUL-terminated UTF-8 */
} engine_message;

/* A variable for the template: its value is JSON, such as "false", "\"high\"" or a list of tools. */
typedef struct engine_template_arg {
    const char *name, *json;
} engine_template_arg;

typedef struct engine_chat_options {
    size_t size;
    int no_generation_prompt;  /* nonzero: do not end with the marker that asks for the assistant's answer */
    const char *template_text; /* a template (Jinja) to use instead of the model's own; NULL: that one */
    const char *messages_json; /* the conversation as a JSON array of objects, with whatever fields the template knows
                                  (tool_calls, reasoning_content, content in parts); only with messages NULL, n 0 */
    const engine_template_arg *args; /* these replace variables of the same name, but not messages */
    size_t n_args;
} engine_chat_options;

/* Renders a conversation with the chat template and tokenizes it: the template's markers become special tokens, while
   the same words inside a message stay text. The template alone decides about BOS: none is added to what it renders.
   Returns the number of ids. ENGINE_EUNSUPPORTED when the model has no template and none is given; ENGINE_ETEMPLATE
   with the template's own words when it refuses. */
ENGINE_API int engine_render_chat(const engine_model *model, const engine_message *messages, size_t n,
                                  const engine_chat_options *opt, int32_t *ids, size_t cap, engine_error *err);

/* ---- sessions ------------------------------------------------------------------------------------------------ */

typedef struct engine_session engine_session;

typedef struct engine_session_options {
    size_t size;
    int n_ctx; /* tokens, up to 2^28; 0: what the model was trained for, or less where memory says so (see the log) */
    int chunk; /* prefill rows at a time, 1 to 4096; 0: 512. Changes speed and scratch memory, never a result */
    const char *kv;  /* type of the cache rows: "f16" (NULL too) or "q8_0" */
    int checkpoints; /* in models with window layers: how many earlier positions keep their window, so that a rewind to
                        them costs nothing; 0: 8, -1: none. Without window layers every position is one already */
} engine_session_options;

/* A session is one timeline. Its keys and values lie in pages of 128 tokens that belong to the model and are shared by
   all sessions with the same tokens before them: a page is computed once. Room for n_ctx tokens is set aside here, so
   that a session never runs out of it; memory is used as pages are filled. What a freed session leaves behind stays
   as a cache until other sessions need the room, or the model is closed. *out is NULL on failure. */
ENGINE_API int engine_session_new(engine_session **out, engine_model *model, const engine_session_options *opt,
                                  engine_error *err);
ENGINE_API void engine_session_free(engine_session *session);

/* The session's context size in tokens. */
ENGINE_API int engine_session_ctx(const engine_session *session);

/* Makes the timeline equal to ids[0 ... n): keeps the longest prefix that it already holds or finds in the pages of any
   session of this model, drops the rest and evaluates what is new. Afterwards the logits of the last position can be
   read. Returns how many tokens were reused. On ENGINE_ECANCELLED the timeline is a prefix of ids, and a later call
   goes on from there; any other failure after the checks of the arguments leaves a prefix as well. n = 0 empties it. */
ENGINE_API int engine_sync(engine_session *session, const int32_t *ids, size_t n, engine_error *err);

/* Appends ids to the timeline and evaluates them. Returns 0. On failure the timeline is what it was, with those of the
   ids that were evaluated. */
ENGINE_API int engine_eval(engine_session *session, const int32_t *ids, size_t n, engine_error *err);

/* Shortens the timeline to n tokens. The logits become those of its new last position (evaluated again if
   they are asked for). In a model with window layers what lies between the nearest checkpoint and n is evaluated again
   as well, by the next call that computes. */
ENGINE_API int engine_rewind(engine_session *session, size_t n, engine_error *err);

/* The timeline; following snprintf. */
ENGINE_API int engine_tokens(const engine_session *session, int32_t *ids, size_t cap);

/* Stops the call that is computing on this session now; if none is, the next one that would compute ends at once. That
   call returns ENGINE_ECANCELLED, and the request is used up. One that comes too late to stop a call is dropped at its
   end. Safe from any thread and from a signal handler. */
ENGINE_API void engine_cancel(engine_session *session);

/* fn(user, done, total) is called between the chunks of an evaluation, in tokens, 0 < done < total: never for one that
   fits into one chunk. NULL: none. */
typedef int (*engine_progress_fn)(void *user, int64_t done, int64_t total);
ENGINE_API void engine_on_progress(engine_session *session, engine_progress_fn fn, void *user);

/* ---- batches ------------------------------------------------------------------------------------------------- */

typedef struct engine_batch_item {
    engine_session *session; /* each session at most once; all of one model and one type of cache rows */
    const int32_t *ids;      /* appended to its timeline */
    size_t n;                /* with 0, what is pending is evaluated */
} engine_batch_item;

/* Logits of one row: those after ids[i] of items[item]. Runs under the model's lock, like engine_logits_fn. */
typedef int (*engine_step_fn)(void *user, size_t item, size_t i, const float *logits);

/* Appends to several sessions and evaluates their rows together, as many in one pass as the smallest of their chunks
   allows: the weights are read once for all of them. Afterwards each session's logits can be read. With fn, the logits
   of every row of ids are passed to it, item by item. On failure each timeline is what it was, with those of its ids
   that were evaluated. Cancelling one of the sessions ends the call for all. */
ENGINE_API int engine_step(const engine_batch_item *items, size_t n_items, engine_step_fn fn, void *user,
                           engine_error *err);

/* ---- sessions on disk ---------------------------------------------------------------------------------------- */

/* Bytes of the caller that go with the timeline into its file, such as the messages of a conversation; copied. NULL, 0
   removes them. engine_note returns them, following snprintf. */
ENGINE_API int engine_set_note(engine_session *session, const void *data, size_t len, engine_error *err);
ENGINE_API int engine_note(const engine_session *session, char *out, size_t cap);

/* Writes the timeline with its cache to `path`: under another name (path + ".part") first, which then takes the place
   of an old file, so that a crash or a full disk leaves the old one. The mode is 0600. */
ENGINE_API int engine_save(engine_session *session, const char *path, engine_error *err);

/* Replaces the timeline by one from a file. It must come from this very model file and have cache rows of this
   session's type; a damaged, cut or newer file is refused. On failure the session is what it was
   (unless the file changes while it is read: then the timeline is empty). Returns the number of tokens. */
ENGINE_API int engine_load(engine_session *session, const char *path, engine_error *err);

/* ---- logits and sampling ------------------------------------------------------------------------------------- */

/* *out: n_vocab floats, the logits after the last token of the timeline; valid until the next call on this session.
   Returns n_vocab. ENGINE_EINVAL when the timeline is empty. */
ENGINE_API int engine_logits(engine_session *session, const float **out, engine_error *err);

/* Logits at every position: evaluates ids like engine_eval and calls fn(user, i, logits) for each i in [0, n), in
   order; `logits` (n_vocab floats) predicts the token after ids[i] and is valid inside the call. fn runs under the
   model's lock: it must not call functions that compute on, make or free a session of this model. When fn stops it, the
   timeline ends at a chunk's boundary. */
typedef int (*engine_logits_fn)(void *user, size_t i, const float *logits);
ENGINE_API int engine_eval_all(engine_session *session, const int32_t *ids, size_t n, engine_logits_fn fn, void *user,
                               engine_error *err);

typedef struct engine_candidate {
    int32_t id;
    float logit;
    float logprob; /* natural logarithm of its probability at temperature 1, without any filter */
} engine_candidate;

/* The `cap` best candidates after the last token, best first, ties by lower id. Returns how many were written. */
ENGINE_API int engine_top(engine_session *session, engine_candidate *out, size_t cap, engine_error *err);

typedef struct engine_logit_bias {
    int32_t id;
    float bias; /* added to the token's logit; -INFINITY: never. Banning all tokens is ENGINE_EINVAL */
} engine_logit_bias;

typedef struct engine_sampling {
    size_t size;
    float temperature; /* 0 to 1000; 0: greedy (the default here; the command's is 0.8) */
    int top_k;         /* keep the k best; 0: off */
    float top_p;       /* 0 to 1: keep the smallest set with this probability; 0 and 1: off */
    float min_p;       /* 0 to 1: drop what has less than min_p times the best one's probability; 0: off */
    uint64_t seed;     /* any; a draw depends on it and on the length of the timeline, on nothing else */
    float typical_p;   /* 0 to 1: keep the set nearest to the expected surprise with this probability; 0 and 1: off */
    /* Penalties look at the last penalty_last_n tokens of the timeline (0: 64; -1: all). */
    int penalty_last_n;
    float repeat_penalty;    /* logits of these tokens: divided by it when positive, else multiplied; 0 to 100; 0 and
                                1: off */
    float presence_penalty;  /* subtracted once from the logit of each of them; -100 to 100; 0: off */
    float frequency_penalty; /* subtracted once per occurrence; -100 to 100; 0: off */
    /* DRY (don't repeat yourself): a token that would continue a repetition of n >= dry_allowed_length tokens loses
       dry_multiplier * dry_base ^ (n - dry_allowed_length), unless it contains a breaker itself. */
    float dry_multiplier;            /* 0 to 1000; 0: off */
    float dry_base;                  /* 1 to 100; 0: 1.75 */
    int dry_allowed_length;          /* 0: 2 */
    int dry_last_n;                  /* tokens looked back on; 0 and -1: all */
    const char *const *dry_breakers; /* no repetition reaches beyond one of these strings, of 1 to 256 bytes;
                                        NULL: newline : " * */
    size_t n_dry_breakers;
    /* XTC (exclude top choices): with this probability, all tokens of at least xtc_threshold but the least likely of
       them are dropped. */
    float xtc_probability;         /* 0 to 1; 0: off */
    float xtc_threshold;           /* 0 to 0.5; 0: 0.1 */
    const engine_logit_bias *bias; /* needed during the call only */
    size_t n_bias;
} engine_sampling;

/* *out, up to out->size, becomes what people expect (temperature 0.8, top-k 40, top-p 0.95, min-p 0.05), or what the
   model's own metadata (general.sampling.*) asks for; from_model: nonzero afterwards when it did; may be NULL. What the
   file asks for and cannot have is a warning in the log. */
ENGINE_API int engine_sampling_defaults(const engine_model *model, engine_sampling *out, int *from_model,
                                        engine_error *err);

/* Chooses the next token from the logits, without appending it: bias, penalties, DRY, then, unless greedy, top-k,
   typical, top-p, min-p, XTC, temperature. Returns its id. */
ENGINE_API int engine_sample(engine_session *session, const engine_sampling *sampling, engine_error *err);

enum {
    ENGINE_STOP_END = 0,      /* the model ended its turn */
    ENGINE_STOP_LENGTH = 1,   /* max_tokens */
    ENGINE_STOP_CONTEXT = 2,  /* the context is full; n_tokens may be 0 */
    ENGINE_STOP_STRING = 3,   /* one of `stops` */
    ENGINE_STOP_CALLBACK = 4, /* the callback returned nonzero */
    ENGINE_STOP_CANCELLED = 5 /* the call failed or was cancelled on the way: see its return value */
};

/* Receives whole characters only: bytes are held back until their character is complete, and what stays incomplete at
   the end becomes U+FFFD. `text` is not NUL-terminated. Nonzero stops the generation. */
typedef int (*engine_text_fn)(void *user, const char *text, size_t len);

typedef struct engine_generate_options {
    size_t size;
    int max_tokens;           /* 0: until the model ends its turn or the context is full */
    int ignore_end;           /* nonzero: go on past end tokens */
    const char *const *stops; /* the text ends before the first of these strings; needed during the call only */
    size_t n_stops;
    const engine_sampling *sampling; /* NULL: greedy */
    /* Gets the reasoning of a model that marks it (<think> ... </think>), without the marks and the newlines beside
       them; the text function then gets the answer only, and the stop strings count in the answer only. What the prompt
       ends with counts: it may have opened the reasoning. NULL: everything is text, marks included unless they are
       control tokens. */
    engine_text_fn on_reasoning;
} engine_generate_options;

typedef struct engine_result {
    size_t size;      /* set by the caller; 0: sizeof(engine_result) */
    int reason;       /* ENGINE_STOP_* */
    int n_tokens;     /* sampled, the end token included */
    const char *stop; /* with ENGINE_STOP_STRING: which one, the caller's own pointer; else NULL */
    int n_reasoning;  /* of n_tokens, those of the reasoning and its marks; 0 without on_reasoning */
} engine_result;

/* Samples, appends and evaluates tokens until a reason to stop. The last token of an answer, an end token included, is
   appended but not evaluated: the next sync or eval does that. On ENGINE_ECANCELLED fn has received the text up to
   there, and the timeline holds what was evaluated. fn NULL: no text is wanted; result may be NULL. */
ENGINE_API int engine_generate(engine_session *session, const engine_generate_options *opt, engine_text_fn fn,
                               void *user, engine_result *result, engine_error *err);

typedef struct engine_session_stats {
    size_t size;              /* set by the caller */
    int64_t prompt_tokens;    /* of the last engine_sync: tokens asked for */
    int64_t reused_tokens;    /* of those, not evaluated again */
    int64_t shared_tokens;    /* of those, found in pages of other or earlier timelines */
    double prefill_seconds;   /* time of the last engine_sync */
    int64_t decode_tokens;    /* single-token steps since the last engine_sync */
    double decode_seconds;    /* their time in all */
    double itl_p50, itl_p99;  /* seconds between tokens, over the last 4096 of those steps */
    int64_t decode_bytes;     /* bytes of weights and cache that they read */
    int64_t n_tokens;         /* length of the timeline */
    int64_t kv_bytes;         /* bytes of cache pages that it uses, alone or with others */
    int64_t evaluated;        /* rows evaluated since the session was made: what no reuse could save */
    int64_t checkpoint_bytes; /* of kv_bytes, what checkpoints alone hold */
    int n_checkpoints; /* positions that can be gone back to without computing anew, beside the page boundaries */
} engine_session_stats;

ENGINE_API int engine_stats(const engine_session *session, engine_session_stats *stats, engine_error *err);

/* ---- planning ------------------------------------------------------------------------------------------------ */

typedef struct engine_plan_info {
    size_t size; /* set by the caller */
    int n_ctx, chunk, threads;
    char kv[16], backend[32];
    int64_t weight_bytes;     /* tensor data, mapped from the file */
    int64_t widened_bytes;    /* small tensors that are kept in another format, in memory */
    int64_t page_bytes;       /* of one page of 128 tokens */
    int64_t kv_token_bytes;   /* of cache per token of context */
    int64_t cache_bytes;      /* pages for n_ctx tokens, checkpoints included */
    int64_t checkpoint_bytes; /* of these, for checkpoints */
    int64_t work_bytes;       /* rows of one step, page tables, logits */
    int64_t scratch_bytes;    /* the operations' own */
    int64_t session_bytes;    /* the session's arrays on the host: tokens, logits; the sampler's come on top */
    int64_t memory_bytes;     /* of this machine, or of the container */
    int64_t max_ctx;      /* tokens of context that fit into that memory beside everything else; 0: not even one page */
    int64_t decode_bytes; /* weights that one decode step reads */
    int64_t decode_kv_bytes; /* cache that it reads at n_ctx tokens */
    int64_t token_macs;      /* multiply-adds with weights per token of prefill (attention comes on top) */
} engine_plan_info;

/* What a session with these options will need, without making it or reading the weights: cache_bytes + work_bytes +
   scratch_bytes is what engine_info's allocated_bytes will show when it is the model's only session. */
ENGINE_API int engine_plan(const char *path, const engine_open_options *open, const engine_session_options *session,
                           engine_plan_info *plan, engine_error *err);

#ifdef __cplusplus
}
#endif
#endif
