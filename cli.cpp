// cli.cpp: the engine program. It knows engine.h and nothing else of ours.   MIT licence, see LICENSE.
//
// CONTENTS
//   1. SIGNALS       what Ctrl-C, a closed terminal and a closed pipe do
//   2. OUTPUT        stdout for results, stderr for everything else
//   3. OPTIONS       the one table of options, its parser and its help
//   4. JSON          writing it, and knowing it
//   5. FILES         texts in, texts out
//   6. MODEL         opening, tokenizing, the settings of an answer
//   7. CONVERSATION  messages, what they become in the model, and their place in a session file
//   8. ANSWER        one prompt in, one streamed answer out, and its statistics
//   9. RUN           one answer to what the arguments and stdin make together
//  10. LINES         reading lines from a terminal, with editing, history and completion
//  11. CHAT          the conversation on a terminal
//  12. MACHINE       what the memory and the processor can do at most
//  13. COMMANDS      tokenize, info, perplexity, bench, plan
//  14. MAIN
//
// Exit codes: 0 ok, 1 error, 2 usage, 130 interrupted (143 by SIGTERM). A closed pipe on stdout is a quiet 0.
// stdout carries what was asked for and nothing else; -q silences stderr but for errors. No colour is ever used.

#include "engine.h"

#include <dirent.h>
#include <fcntl.h>
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#ifdef HAVE_LIBEDIT
#include <histedit.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using std::string;
using std::vector;

enum { EXIT_OK = 0, EXIT_ERROR = 1, EXIT_USAGE = 2 };

// Thrown to leave the program, after its reason has been printed.
struct quit {
    int code;
};

double now_seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// ---------------------------------------------------------------------------------------------------
// 1. SIGNALS
//
// SIGINT, SIGTERM and SIGHUP stop a computing session through engine_cancel; a second one, or one that comes while
// nothing computes, ends the program at once. At the chat prompt they only wake the line reader, through a
// pipe, so that no wake-up is lost and no thread needs to be the right one. SIGPIPE and SIGXFSZ are ignored: a
// closed pipe and a file that may not grow show as errors.
// ---------------------------------------------------------------------------------------------------

std::atomic<engine_session *> computing{nullptr}; // the session to cancel
std::atomic<int> caught{0};                       // the last signal since it was set to 0
std::atomic<bool> at_prompt{false};
std::atomic<int> redraw{0}; // SIGWINCH: the terminal has another size; SIGCONT: the program was stopped
int wake_pipe[2] = {-1, -1};
termios terminal_was; // before the chat changed it
std::atomic<bool> terminal_changed{false};

void restore_terminal() { // also in a signal's handler
    if (!terminal_changed.exchange(false))
        return;
    tcsetattr(0, TCSANOW, &terminal_was);
    if (write(1, "\x1b[?2004l", 8) < 0)
        errno = 0; // it is gone
}

void on_signal(int sig) {
    const int saved = errno;
    engine_session *session = computing;
    if (sig == SIGCONT || sig == SIGWINCH)
        redraw = sig;
    else if (at_prompt)
        caught = sig == SIGINT && caught ? caught.load() : sig;   // the weakest of them replaces none
    else if (!session || (caught.exchange(sig) && sig != SIGHUP)) // shells send SIGHUP twice
        restore_terminal(), _exit(128 + sig);
    else
        engine_cancel(session);
    if (at_prompt && write(wake_pipe[1], "", 1) < 0)
        errno = 0; // a full pipe wakes as well
    errno = saved;
}

// What the parent has made this process ignore (as nohup and a shell's background jobs do) stays ignored.
void catch_signal(int sig) {
    struct sigaction act = {};
    if (sigaction(sig, nullptr, &act) == 0 && act.sa_handler == SIG_IGN)
        return;
    act = {};
    act.sa_handler = on_signal; // no SA_RESTART: a blocked write must return
    sigaction(sig, &act, nullptr);
}

void catch_signals() {
    for (int sig : {SIGINT, SIGTERM, SIGHUP})
        catch_signal(sig);
    struct sigaction act = {};
    act.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &act, nullptr);
    sigaction(SIGXFSZ, &act, nullptr);
}

// A closed descriptor 0, 1 or 2 would be given to the next file that is opened, the model. They become /dev/null:
// stdin is at its end, results cannot be written (stdout is open for reading only), messages vanish.
void hold_standard_descriptors() {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", fd == 2 ? O_WRONLY : O_RDONLY) != fd)
            _exit(EXIT_ERROR);
}

// ---------------------------------------------------------------------------------------------------
// 2. OUTPUT
//
// Plain write loops: what is written has left the program when they return, so that no signal and no exit
// can lose or repeat it.
// ---------------------------------------------------------------------------------------------------

int verbosity = 1; // 0: errors only (-q), 1: warnings and statistics too, 2: the library's messages as well (-v)
std::atomic<bool> bar_shown{false}; // the cursor is in a progress bar
enum { BAR_WIDTH = 76 };

void erase_bar() {
    if (bar_shown)
        dprintf(2, "\r%*s\r", int(BAR_WIDTH), "");
    bar_shown = false;
}

// Writes all of it to stdout. Returns 0 or an errno; EINTR when a signal came while the reader did not read.
int write_out(const char *text, size_t len) {
    erase_bar();
    while (len) {
        const ssize_t n = write(1, text, len);
        if (n >= 0) {
            text += n, len -= size_t(n);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) { // a non-blocking stdout, inherited
            pollfd p = {1, POLLOUT, 0};
            if (poll(&p, 1, -1) < 0 && caught)
                return EINTR;
        } else if (errno != EINTR || caught) {
            return errno;
        }
    }
    return 0;
}

__attribute__((format(printf, 1, 0))) string vstrf(const char *fmt, va_list args) {
    va_list again;
    va_copy(again, args);
    const int n = vsnprintf(nullptr, 0, fmt, again);
    va_end(again);
    string s(n > 0 ? size_t(n) : 0, '\0');
    if (n > 0)
        vsnprintf(&s[0], s.size() + 1, fmt, args);
    return s;
}

__attribute__((format(printf, 1, 2))) string strf(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    string s = vstrf(fmt, args);
    va_end(args);
    return s;
}

string counted(int64_t n, const char *what) { return strf("%lld %s%s", (long long)n, what, n == 1 ? "" : "s"); }

// One line on stderr in one write, so that lines of several threads do not mix.
void say(const char *fmt, va_list args) {
    const string line = "engine: " + vstrf(fmt, args) + "\n";
    erase_bar();
    if (write(2, line.data(), line.size()) < 0)
        return; // nowhere left to say it
}

// What -q silences.
__attribute__((format(printf, 1, 2))) void note(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    if (verbosity >= 1)
        say(fmt, args);
    va_end(args);
}

// What a command of the chat was asked for: -q does not silence it.
__attribute__((format(printf, 1, 2))) void tell(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const string text = vstrf(fmt, args);
    va_end(args);
    if (write(2, text.data(), text.size()) < 0)
        return; // nowhere left to say it
}

[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(int code, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    say(fmt, args);
    va_end(args);
    throw quit{code};
}

void on_log(void *, int level, const char *text) {
    if (verbosity >= 2 || level >= ENGINE_LOG_WARN)
        note("%s", text);
}

// Leaves for the reason that write_out gave: quietly when the reader has gone.
[[noreturn]] void leave_unwritten(int code) {
    if (code != EPIPE && code != EINTR)
        fail(EXIT_ERROR, "standard output: %s", strerror(code));
    throw quit{code == EPIPE ? EXIT_OK : 128 + caught};
}

// For loops of library calls: a cancel that comes as one call ends does not stop the next.
void leave_if_caught() {
    if (caught)
        throw quit{128 + caught};
}

void print(const string &text) {
    if (const int code = write_out(text.data(), text.size()))
        leave_unwritten(code);
}

bool bar_wanted() { return verbosity >= 1 && isatty(2); }

// A bar for work that reports (done, total); it stays away for the first second.
struct progress {
    const char *what;
    double start = now_seconds();

    void at(int64_t done, int64_t total) const {
        erase_bar();
        if (done >= total || now_seconds() - start < 1)
            return;
        const int width = 30, full = int(width * done / total);
        dprintf(2, "%s [%.*s%*s] %lld/%lld", what, full, "##############################", width - full, "",
                (long long)done, (long long)total);
        bar_shown = true;
    }
    static int report(void *user, int64_t done, int64_t total) {
        static_cast<progress *>(user)->at(done, total);
        return 0;
    }
};

// ---------------------------------------------------------------------------------------------------
// 3. OPTIONS
//
// One row per option: which commands take it, where its value goes, its range and its help. An option that a
// command does not take is an error there.
// ---------------------------------------------------------------------------------------------------

// What shapes an answer: /set changes it, and session files keep it.
struct answer_settings {
    engine_sampling sampling = {};
    int max_tokens = 0;
    bool ignore_eos = false;
    const char *think = nullptr, *reasoning = "stderr";
    vector<const char *> stops, dry_breakers;
    vector<engine_logit_bias> bias;
};

struct option_row;

// An option with its value, as it was written.
struct setting {
    const option_row *row;
    string value;
};

// What the command line asked for.
struct options {
    const char *model = nullptr, *prompt = nullptr, *file = nullptr, *system = nullptr;
    const char *messages = nullptr, *session = nullptr, *kv = nullptr, *template_file = nullptr;
    vector<const char *> template_args;
    int ctx = 0, threads = 0, chunk = 0;
    answer_settings answer;
    bool raw = false, no_mmap = false, json = false, logits = false;
    bool decode = false, no_bos = false, special = false, meta = false;
    bool quiet = false, verbose = false, help = false;
    int prefill_tokens = 512, decode_tokens = 0, repeat = 3; // decode_tokens 0 here: the command's own default
    vector<int> depths;
    std::list<setting> given; // in their order; never moved, since `answer` points into it
} opt;

// Which commands take an option, and what else is to know about it, in one set of bits.
enum option_bits {
    RUN = 1,
    CHAT = 2,
    TOKENIZE = 4,
    INFO = 8,
    PERPLEXITY = 16,
    BENCH = 32,
    PLAN = 64,
    SETTABLE = 128,      // by /set, and kept in session files
    SHAPES_ANSWER = 256, // without effect where there is none
    NOT_KEPT = 512,      // in session files: a later answer would be cut for a forgotten reason
    ALL = 127,
    GENERATE = RUN | CHAT,
    COMPUTES = RUN | CHAT | PERPLEXITY | BENCH,
    SIZES = RUN | CHAT | PLAN,
    SAMPLE = RUN | CHAT | SETTABLE | SHAPES_ANSWER
};
enum option_kind { FLAG, NUMBER, COUNT, REAL, TEXT, CHOICE, SEED, TEXTS, NUMBERS, BIAS };

// Where a value goes; its type says how it is read.
struct option_target {
    option_kind kind;
    void *at;
    option_target(option_kind k, void *p) : kind(k), at(p) {}
    option_target(bool *p) : kind(FLAG), at(p) {}
    option_target(int *p) : kind(NUMBER), at(p) {}
    option_target(float *p) : kind(REAL), at(p) {}
    option_target(const char **p) : kind(TEXT), at(p) {}
    option_target(uint64_t *p) : kind(SEED), at(p) {}
    option_target(vector<const char *> *p) : kind(TEXTS), at(p) {}
    option_target(vector<int> *p) : kind(NUMBERS), at(p) {}
    option_target(vector<engine_logit_bias> *p) : kind(BIAS), at(p) {}
    template <class T> T &get() const { return *static_cast<T *>(at); }
};

struct option_row {
    char letter;              // 0: none
    const char *name, *value; // value: what the help calls it (of a CHOICE: all there are), null for a flag
    unsigned commands;
    option_target target;
    double lo, hi; // the range of a number
    const char *help;
};

const double INT_TOP = INT_MAX, CTX_TOP = 1 << 28;

const option_row option_table[] = {
    {'m', "model", "FILE", ALL, &opt.model, 0, 0, "the model, a GGUF file (or simply the first argument)"},
    {'p', "prompt", "TEXT", RUN | TOKENIZE, &opt.prompt, 0, 0, "the text"},
    {'f', "file", "FILE", RUN | TOKENIZE | PERPLEXITY, &opt.file, 0, 0, "read the text from a file; - is stdin"},
    {'s', "system", "TEXT", GENERATE, &opt.system, 0, 0, "the system message"},
    {0, "messages", "FILE", RUN, &opt.messages, 0, 0, "the conversation as a JSON array of messages; - is stdin"},
    {0, "session", "FILE", GENERATE, &opt.session, 0, 0,
     "go on with the conversation in FILE, if it exists, and write it (chat: after each answer; from 64 MiB on at "
     "exit)"},
    {'n', "max-tokens", "N", SAMPLE | NOT_KEPT, &opt.answer.max_tokens, -1, INT_TOP,
     "stop after N tokens (0 or -1: at the end of turn or context)"},
    {'c', "ctx", "N", SIZES, &opt.ctx, 0, CTX_TOP, "context size in tokens (0: as the model was trained)"},
    {'c', "ctx", "N", PERPLEXITY, &opt.ctx, 2, CTX_TOP, "tokens per window (512)"},
    {0, "kv", "f16|q8_0", COMPUTES | PLAN, option_target(CHOICE, &opt.kv), 0, 0, "type of the cache rows (f16)"},
    {'t', "threads", "N", COMPUTES | PLAN, &opt.threads, 0, 512, "threads (0: one per core)"},
    {0, "template", "FILE", GENERATE, &opt.template_file, 0, 0, "a chat template (Jinja) instead of the model's own"},
    {0, "template-arg", "K=V", GENERATE, &opt.template_args, 0, 0,
     "a variable for the template; V is JSON, or else taken as text; repeatable"},
    {0, "think", "on|off", GENERATE | SETTABLE, option_target(CHOICE, &opt.answer.think), 0, 0,
     "ask the template for reasoning, or for none (its variable enable_thinking)"},
    {0, "reasoning", "stderr|tagged|hide", SAMPLE, option_target(CHOICE, &opt.answer.reasoning), 0, 0,
     "where reasoning goes; tagged: to stdout between <think> and </think>"},
    {0, "temp", "X", SAMPLE, &opt.answer.sampling.temperature, 0, 1000,
     "temperature (0.8, or as the model's file says); 0 takes the likeliest token always"},
    {0, "top-k", "N", SAMPLE, &opt.answer.sampling.top_k, 0, INT_TOP,
     "sample from the N likeliest tokens (40; 0: off)"},
    {0, "top-p", "X", SAMPLE, &opt.answer.sampling.top_p, 1e-6, 1,
     "sample from the likeliest that make up X (0.95; 1: off)"},
    {0, "min-p", "X", SAMPLE, &opt.answer.sampling.min_p, 0, 1,
     "leave out what has less than X of the best (0.05; 0: off)"},
    {0, "typical", "X", SAMPLE, &opt.answer.sampling.typical_p, 1e-6, 1,
     "sample from those nearest to the expected surprise that make up X (1: off)"},
    {0, "repeat-penalty", "X", SAMPLE, &opt.answer.sampling.repeat_penalty, 0, 100,
     "divide the logits of recent tokens by X (1: off)"},
    {0, "presence-penalty", "X", SAMPLE, &opt.answer.sampling.presence_penalty, -100, 100,
     "subtract X from the logit of each recent token (0: off)"},
    {0, "frequency-penalty", "X", SAMPLE, &opt.answer.sampling.frequency_penalty, -100, 100,
     "subtract X for each time that it occurred (0: off)"},
    {0, "repeat-last-n", "N", SAMPLE, option_target(COUNT, &opt.answer.sampling.penalty_last_n), 1, INT_TOP,
     "how many tokens are recent (64; -1: all)"},
    {0, "dry-multiplier", "X", SAMPLE, &opt.answer.sampling.dry_multiplier, 0, 1000,
     "DRY: subtract X * base ^ (n - allowed length) from what repeats n tokens (0: off)"},
    {0, "dry-base", "X", SAMPLE, &opt.answer.sampling.dry_base, 1, 100, "DRY: the base (1.75)"},
    {0, "dry-allowed-length", "N", SAMPLE, &opt.answer.sampling.dry_allowed_length, 1, INT_TOP,
     "DRY: repetitions shorter than this are free (2)"},
    {0, "dry-last-n", "N", SAMPLE, option_target(COUNT, &opt.answer.sampling.dry_last_n), 1, INT_TOP,
     "DRY: tokens to look back on (-1: all)"},
    {0, "dry-breaker", "TEXT", SAMPLE, &opt.answer.dry_breakers, 0, 0,
     "DRY: no repetition reaches beyond this text (newline : \" *); repeatable"},
    {0, "xtc-probability", "X", SAMPLE, &opt.answer.sampling.xtc_probability, 0, 1,
     "XTC: how often the likeliest tokens are left out (0: off)"},
    {0, "xtc-threshold", "X", SAMPLE, &opt.answer.sampling.xtc_threshold, 1e-6, 0.5,
     "XTC: those of at least this probability but the last of them (0.1)"},
    {0, "logit-bias", "ID+X", SAMPLE, &opt.answer.bias, 0, 0,
     "add X to a token's logit: 15+2.5, 15-1, 15=-inf (never); repeatable"},
    {0, "seed", "N", SAMPLE, &opt.answer.sampling.seed, 0, 0, "seed of the draws (-1: a new one; it is shown)"},
    {0, "stop", "TEXT", SAMPLE | NOT_KEPT, &opt.answer.stops, 0, 0, "end the answer before this text; repeatable"},
    {0, "ignore-eos", nullptr, SAMPLE, &opt.answer.ignore_eos, 0, 0, "go on when the model ends its turn"},
    {0, "raw", nullptr, RUN, &opt.raw, 0, 0, "complete the text as it is; special tokens in it count"},
    {0, "logits", nullptr, RUN, &opt.logits, 0, 0,
     "no answer: print the logits after the prompt as JSON (a --session is read, not written)"},
    {0, "decode", nullptr, TOKENIZE, &opt.decode, 0, 0, "the other way: numbers in, text out"},
    {0, "special", nullptr, TOKENIZE, &opt.special, 0, 0, "read special tokens in the text; --decode: write them"},
    {0, "no-bos", nullptr, TOKENIZE, &opt.no_bos, 0, 0, "leave out the BOS (and EOS) that the model wants"},
    {0, "meta", nullptr, INFO, &opt.meta, 0, 0, "all metadata of the file"},
    {'p', "prefill", "N", BENCH, &opt.prefill_tokens, 0, INT_TOP, "prompt tokens to evaluate (512; 0: skip)"},
    {'n', "decode", "N", BENCH, &opt.decode_tokens, 0, INT_TOP, "single tokens to evaluate (64; 0: skip)"},
    {'p', "prompt-tokens", "N", PLAN, &opt.prefill_tokens, 1, INT_TOP, "tokens of the prompt to plan for (512)"},
    {'n', "answer-tokens", "N", PLAN, &opt.decode_tokens, 1, INT_TOP, "tokens of the answer to plan for (256)"},
    {0, "depth", "LIST", BENCH, &opt.depths, 0, INT_TOP, "tokens already in the context (0), as 0,1024,4096"},
    {'r', "repeat", "N", BENCH, &opt.repeat, 1, 1000, "measurements, of which the median counts (3)"},
    {0, "chunk", "N", COMPUTES | PLAN, &opt.chunk, 0, 4096, "prompt tokens at a time (512)"},
    {0, "no-mmap", nullptr, ALL, &opt.no_mmap, 0, 0, "read the model into memory instead of mapping it"},
    {0, "json", nullptr, ALL & ~CHAT, &opt.json, 0, 0, "print JSON"},
    {'q', "quiet", nullptr, ALL, &opt.quiet, 0, 0, "nothing on stderr but errors"},
    {'v', "verbose", nullptr, COMPUTES, &opt.verbose, 0, 0, "the model's facts and the library's messages on stderr"},
    {'h', "help", nullptr, ALL, &opt.help, 0, 0, "this text"},
};

// The option that /set and session files know by this name, or null.
const option_row *settable(const string &name) {
    for (const option_row &row : option_table)
        if ((row.commands & SETTABLE) && name == row.name)
            return &row;
    return nullptr;
}

bool is_kept(const option_row &row) { return (row.commands & (SETTABLE | NOT_KEPT)) == SETTABLE; }

struct command {
    const char *name;
    unsigned bit;
    void (*run)();
    const char *summary, *about;
    int decode_tokens; // its default of -n
};

// Edits between two words.
size_t distance(const string &a, const string &b) {
    vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++)
        row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            const size_t swap = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({row[j] + 1, row[j - 1] + 1, swap});
        }
    }
    return row.back();
}

// " Did you mean X?", or "" when no name is near.
string did_you_mean(const string &word, const vector<string> &names) {
    const string *best = nullptr;
    size_t least = word.size() / 3 + 2;
    for (const string &name : names) {
        const size_t d = distance(word, name);
        if (d < least)
            least = d, best = &name;
    }
    return best ? " Did you mean " + *best + "?" : "";
}

string option_label(const option_row &row) {
    return row.letter ? strf("-%c/--%s", row.letter, row.name) : strf("--%s", row.name);
}

// Whole numbers and decimals only: no space, sign but '-', hexadecimal, infinity, or anything after them.
bool parse_real(const char *text, double lo, double hi, double &out) {
    if (!*text || text[strspn(text, "0123456789.eE+-")])
        return false;
    char *end;
    out = strtod(text, &end);
    return !*end && end != text && out >= lo && out <= hi;
}

bool parse_whole(const char *text, double lo, double hi, uint64_t &out) {
    if (!*text || text[strspn(text, "0123456789")])
        return false;
    errno = 0;
    out = strtoull(text, nullptr, 10);
    return !errno && double(out) >= lo && double(out) <= hi;
}

// "15+2.5", "15-1", "15=-inf"
bool parse_bias(const char *text, engine_logit_bias &out) {
    const size_t digits = strspn(text, "0123456789");
    uint64_t id = 0;
    double bias = 0;
    if (!strchr("+-=", text[digits]) || !parse_whole(string(text, digits).c_str(), 0, INT_TOP, id))
        return false;
    const char *value = text + digits + (text[digits] != '-');
    const bool never = strcmp(value, "-inf") == 0;
    if (!never && (!parse_real(value, -1e6, 1e6, bias) || (text[digits] == '+' && *value == '-')))
        return false;
    out.id = int32_t(id);
    out.bias = never ? -HUGE_VALF : float(bias);
    return true;
}

// Stores one value, or a pointer to it. Returns false when it is wrong; `range` then says what would be right.
bool store_option(const option_row &row, const char *text, string &range) {
    const option_target &to = row.target;
    uint64_t whole = 0;
    double real = 0;
    switch (to.kind) {
    case FLAG:
        return to.get<bool>() = true;
    case TEXT:
        range = "a file's name";
        to.get<const char *>() = text;
        return *text || strcmp(row.value, "FILE") != 0;
    case TEXTS:
        range = "some text";
        to.get<vector<const char *>>().push_back(text);
        return *text;
    case CHOICE:
        range = string("one of ") + row.value;
        for (const char *at = row.value; at; at = strchr(at, '|')) {
            at += *at == '|';
            if (string(at, strcspn(at, "|")) == text) {
                to.get<const char *>() = text;
                return true;
            }
        }
        return false;
    case NUMBER:
    case COUNT:
        range = strf("a whole number from %.0f to %.0f%s", row.lo, row.hi, to.kind == COUNT ? ", or -1 for all" : "");
        if ((row.lo == -1 || to.kind == COUNT) && strcmp(text, "-1") == 0) {
            to.get<int>() = -1;
            return true;
        }
        if (!parse_whole(text, row.lo, row.hi, whole))
            return false;
        to.get<int>() = int(whole);
        return true;
    case REAL:
        range = strf("a number from %g to %g", row.lo, row.hi);
        if (!parse_real(text, row.lo, row.hi, real))
            return false;
        to.get<float>() = float(real);
        return true;
    case BIAS: {
        range = "a token and what its logit gets: ID+X, ID-X or ID=X, where X may be -inf after =";
        engine_logit_bias bias;
        if (!parse_bias(text, bias))
            return false;
        to.get<vector<engine_logit_bias>>().push_back(bias);
        return true;
    }
    case SEED:
        range = "a whole number from 0 to 18446744073709551614, or -1 for a random one";
        to.get<uint64_t>() = UINT64_MAX;
        return strcmp(text, "-1") == 0 ||
               (parse_whole(text, 0, HUGE_VAL, to.get<uint64_t>()) && to.get<uint64_t>() != UINT64_MAX);
    case NUMBERS:
        range = strf("whole numbers from %.0f to %.0f with commas between them", row.lo, row.hi);
        to.get<vector<int>>().clear();
        for (string rest = string(text) + ","; !rest.empty(); rest.erase(0, rest.find(',') + 1)) {
            if (!parse_whole(rest.substr(0, rest.find(',')).c_str(), row.lo, row.hi, whole))
                return false;
            to.get<vector<int>>().push_back(int(whole));
        }
        return true;
    }
    return false;
}

[[noreturn]] void unknown_option(const command &cmd, const string &shown, string name) {
    static const char *const other_names[][2] = {{"temperature", "temp"},
                                                 {"ctx-size", "ctx"},
                                                 {"n-predict", "max-tokens"},
                                                 {"cache-type-k", "kv"},
                                                 {"typical-p", "typical"},
                                                 {"chat-template-file", "template"},
                                                 {"prompt-cache", "session"},
                                                 {"dry-penalty-last-n", "dry-last-n"},
                                                 {"dry-sequence-breaker", "dry-breaker"}};
    if (name == "ngl" || name == "gpu-layers" || name == "n-gpu-layers")
        fail(EXIT_USAGE, "%s: this build runs on the CPU only; leave the option out", shown.c_str());
    for (const auto &other : other_names)
        if (name == other[0])
            name = other[1];
    vector<string> names;
    bool elsewhere = false; // another command has it
    for (const option_row &row : option_table)
        if (row.commands & cmd.bit)
            names.push_back(string("--") + row.name);
        else
            elsewhere = elsewhere || name == row.name || (name.size() == 1 && name[0] == row.letter);
    const string near = name.size() > 1 ? did_you_mean("--" + name, names) : "";
    if (elsewhere && near != " Did you mean --" + name + "?")
        fail(EXIT_USAGE, "%s is no option of '%s'; see 'engine help %s'", shown.c_str(), cmd.name, cmd.name);
    fail(EXIT_USAGE, "unknown option %s.%s See 'engine help %s'", shown.c_str(), near.c_str(), cmd.name);
}

// Reads a command's arguments: "-n 5", "-n5", "-qv", "--ctx 5", "--ctx=5"; "--" ends the options.
void parse_options(const command &cmd, int argc, char **argv) {
    bool only_names = false;
    for (int i = 0; i < argc; i++) {
        const char *arg = argv[i];
        if (only_names || arg[0] != '-' || !arg[1]) {
            if (opt.model)
                fail(EXIT_USAGE, "unexpected argument '%s'%s; see 'engine help %s'", arg,
                     cmd.bit & (RUN | TOKENIZE) ? " (the text is given with -p)" : "", cmd.name);
            opt.model = arg;
            continue;
        }
        if (strcmp(arg, "--") == 0) {
            only_names = true;
            continue;
        }
        const bool is_long = arg[1] == '-';
        if (strncmp(arg, "-ngl", 4) == 0)
            unknown_option(cmd, "-ngl", "ngl");
        for (const char *at = is_long ? arg + 2 : arg + 1; *at;) { // one long option, or a bundle of letters
            const char *equals = is_long ? strchr(at, '=') : nullptr;
            const string name = !is_long ? string(1, *at) : equals ? string(at, equals) : string(at);
            const option_row *row = nullptr;
            for (const option_row &r : option_table)
                if ((r.commands & cmd.bit) && (is_long ? name == r.name : *at == r.letter))
                    row = &r;
            if (!row)
                unknown_option(cmd, (is_long ? "--" : "-") + name, name);
            at = is_long ? "" : at + 1;
            const char *value = nullptr;
            if (!row->value && equals)
                fail(EXIT_USAGE, "%s takes no value", option_label(*row).c_str());
            if (row->value) {
                value = equals ? equals + 1 : *at ? at : ++i < argc ? argv[i] : nullptr;
                at = "";
                if (!value)
                    fail(EXIT_USAGE, "%s needs a value; see 'engine help %s'", option_label(*row).c_str(), cmd.name);
            }
            if (row->target.at == &opt.model && opt.model)
                fail(EXIT_USAGE, "two models given: '%s' and '%s'", opt.model, value);
            string range;
            if (!store_option(*row, value, range))
                fail(EXIT_USAGE, "%s: '%s' is not %s", option_label(*row).c_str(), value, range.c_str());
            if (row->letter == 'q' || row->letter == 'v')
                verbosity = row->letter == 'q' ? 0 : 2;
            opt.given.push_back({row, value ? value : "on"});
        }
    }
}

string command_help(const command &cmd) {
    string text =
        strf("engine %s MODEL [options]: %s\n\n%s%s", cmd.name, cmd.summary, cmd.about, *cmd.about ? "\n" : "");
    for (const option_row &row : option_table) {
        if (!(row.commands & cmd.bit))
            continue;
        const string letter = row.letter ? strf("-%c,", row.letter) : "";
        const string left =
            strf("  %-3s --%s%s%s", letter.c_str(), row.name, row.value ? " " : "", row.value ? row.value : "");
        text += strf("%-30s %s\n", left.c_str(), row.help);
    }
    return text;
}

// ---------------------------------------------------------------------------------------------------
// 4. JSON
//
// Enough to write it, and to tell it from other text. Invariant: whatever bytes come in, valid JSON in UTF-8 goes out.
// ---------------------------------------------------------------------------------------------------

// The length of the UTF-8 character at p, or 0 when there is no valid one.
size_t character_length(const char *p, size_t left) {
    const unsigned char c = (unsigned char)*p;
    const size_t n = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    if (n > left || (c >= 0x80 && c < 0xc2) || c > 0xf4)
        return 0;
    for (size_t i = 1; i < n; i++)
        if (((unsigned char)p[i] & 0xc0) != 0x80)
            return 0;
    const unsigned char d = n > 1 ? (unsigned char)p[1] : 0;
    const bool overlong = (c == 0xe0 && d < 0xa0) || (c == 0xf0 && d < 0x90);
    const bool beyond = (c == 0xed && d >= 0xa0) || (c == 0xf4 && d >= 0x90); // surrogates, and above U+10FFFF
    return overlong || beyond ? 0 : n;
}

// How many bytes there are before the first that is no UTF-8.
size_t utf8_length(const string &s) {
    size_t i = 0;
    for (size_t n; i < s.size() && (n = character_length(&s[i], s.size() - i)); i += n)
        continue;
    return i;
}
bool is_utf8(const string &s) { return utf8_length(s) == s.size(); }

string json_string(const string &s) {
    string out = "\"";
    for (size_t i = 0; i < s.size();) {
        const size_t n = character_length(&s[i], s.size() - i);
        if (n == 0)
            out += "\xef\xbf\xbd", i++;
        else if (s[i] == '"' || s[i] == '\\')
            out += '\\', out += s[i++];
        else if (s[i] == '\n' || s[i] == '\t')
            out += s[i++] == '\n' ? "\\n" : "\\t";
        else if ((unsigned char)s[i] < 0x20 || s[i] == 0x7f)
            out += strf("\\u%04x", s[i++]);
        else
            out.append(s, i, n), i += n;
    }
    return out + "\"";
}

string json_number(double x) { return std::isfinite(x) ? strf("%.9g", x) : "null"; }

template <class T, class F> string json_list(const T *items, size_t n, F item) {
    string out = "[";
    for (size_t i = 0; i < n; i++)
        out += (i ? "," : "") + item(items[i]);
    return out + "]";
}

string json_ids(const vector<int32_t> &ids) {
    return json_list(ids.data(), ids.size(), [](int32_t id) { return std::to_string(id); });
}

// Moves p past one JSON value (RFC 8259) and the blanks around it.
bool skip_json(const char *&p, int depth) {
    const auto skip = [&p] { p += strspn(p, " \t\r\n"); };
    const auto string_at = [&p] {
        if (*p++ != '"')
            return false;
        for (; *p != '"'; p++)
            if ((unsigned char)*p < 0x20 || (*p == '\\' && (!*++p || !strchr("\"\\/bfnrtu", *p))) ||
                (*p == 'u' && p[-1] == '\\' && strspn(p + 1, "0123456789abcdefABCDEF") < 4))
                return false;
        p++;
        return true;
    };
    skip();
    bool good = depth > 0;
    if (*p == '"') {
        good = string_at();
    } else if (*p == '{' || *p == '[') {
        const char close = *p == '{' ? '}' : ']';
        p++, skip();
        for (bool first = true; good && *p != close; first = false) {
            good = first || *p++ == ',';
            if (good && close == '}') {
                skip();
                good = string_at() && (skip(), *p++ == ':');
            }
            good = good && skip_json(p, depth - 1);
        }
        p += good;
    } else if (const size_t letters = strspn(p, "aeflnrstu")) {
        const string word(p, letters);
        p += letters;
        good = word == "true" || word == "false" || word == "null";
    } else {
        const auto digits = [&p] {
            const size_t n = strspn(p, "0123456789");
            p += n;
            return n > 0;
        };
        p += *p == '-';
        good = *p == '0' ? p++, true : digits();
        if (good && *p == '.')
            p++, good = digits();
        if (good && (*p == 'e' || *p == 'E')) {
            p += p[1] == '+' || p[1] == '-' ? 2 : 1;
            good = digits();
        }
    }
    skip();
    return good;
}

// Why a list of messages is none, or "". What is no JSON at all is for the library to say, with its line.
string wrong_messages(const char *p) {
    const auto skip = [&p] { p += strspn(p, " \t\r\n"); };
    skip();
    if (*p++ != '[')
        return "";
    skip();
    if (*p == ']')
        return "there is no message in it";
    for (int i = 1;; i++, p++) {
        bool role = false, content = false;
        if (skip(), *p++ != '{')
            return "";
        for (skip(); *p && *p != '}'; p += *p == ',') {
            skip();
            const char *const key = p;
            if (!skip_json(p, 100) || *p++ != ':')
                return "";
            role = role || strncmp(key, "\"role\"", 6) == 0;
            content = content || strncmp(key, "\"content\"", 9) == 0 || strncmp(key, "\"tool_calls\"", 12) == 0;
            if (!skip_json(p, 100) || (*p != ',' && *p != '}'))
                return "";
        }
        if (!role || !content)
            return strf("message %d has no %s", i, role ? "content" : "role");
        p += *p == '}', skip();
        if (*p != ',')
            return "";
    }
}

bool is_json(const char *p) { return skip_json(p, 100) && !*p; }

// ---------------------------------------------------------------------------------------------------
// 5. FILES
//
// Texts from files and pipes, and texts into files. Invariant: an old file is whole until the new one is.
// ---------------------------------------------------------------------------------------------------

const size_t INPUT_LIMIT = size_t(1) << 28; // bytes; a longer text is a mistake, such as an endless pipe

// path "-": stdin, if that is allowed.
string read_input(const char *path, bool or_stdin = true) {
    const bool is_stdin = or_stdin && strcmp(path, "-") == 0;
    const int fd = is_stdin ? 0 : open(path, O_RDONLY | O_CLOEXEC);
    const char *name = is_stdin ? "standard input" : path;
    if (fd < 0)
        fail(EXIT_ERROR, "%s: %s", name, strerror(errno));
    string out;
    vector<char> buf(1 << 16);
    int problem = 0;
    for (ssize_t n = 1; n != 0 && !problem && out.size() <= INPUT_LIMIT;) {
        n = read(fd, buf.data(), buf.size());
        if (n < 0 && errno == EAGAIN) { // a non-blocking stdin, inherited
            pollfd p = {fd, POLLIN, 0};
            poll(&p, 1, -1);
        } else if (n < 0 && (errno != EINTR || caught)) {
            problem = errno;
        }
        out.append(buf.data(), size_t(std::max<ssize_t>(n, 0)));
    }
    if (!is_stdin)
        close(fd);
    if (problem)
        fail(EXIT_ERROR, "%s: %s", name, strerror(problem));
    if (out.size() > INPUT_LIMIT)
        fail(EXIT_ERROR, "%s: more than %zu MiB of text", name, INPUT_LIMIT >> 20);
    return out;
}

void drop_byte_order_mark(string &text) { text.erase(0, text.compare(0, 3, "\xef\xbb\xbf") == 0 ? 3 : 0); }

// A file that must be text.
string read_text(const string &path) {
    string text = read_input(path.c_str(), false);
    const size_t good = utf8_length(text);
    if (good < text.size())
        fail(EXIT_ERROR, "%s: byte %zu is no UTF-8", path.c_str(), good);
    drop_byte_order_mark(text);
    return text;
}

// What a command of the chat calls a file: ~ is the home.
string user_path(const string &name) {
    const char *home = getenv("HOME");
    return home && *home && name[0] == '~' && (name.size() == 1 || name[1] == '/') ? home + name.substr(1) : name;
}

// All zeros when there is no such file.
struct stat state_of(const string &path) {
    struct stat st = {};
    return stat(path.c_str(), &st) < 0 ? (struct stat){} : st;
}

// Before a file is replaced: one that begins like nothing that this program writes stays.
void check_replaceable(const string &path, const char *kind, const vector<string> &beginnings) {
    const struct stat old = state_of(path);
    struct stat link;
    if (!old.st_nlink && lstat(path.c_str(), &link) == 0)
        fail(EXIT_ERROR, "%s: is a link that leads nowhere", path.c_str());
    if (!S_ISREG(old.st_mode) || !old.st_size)
        return;
    char head[16];
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, head, sizeof head);
    const int problem = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0)
        fail(EXIT_ERROR, "%s: is there and cannot be read: %s", path.c_str(), strerror(problem));
    for (const string &b : beginnings)
        if (size_t(n) >= b.size() && string(head, b.size()) == b)
            return;
    fail(EXIT_ERROR, "%s: is there already and is no %s, so it is not overwritten", path.c_str(), kind);
}

// Writes a file that only its owner may read: under another name first, so that a full disk leaves the old one. A link
// stays one. What is no regular file, such as a pipe, is written as it is. Returns 0 or an errno.
int write_file(string path, const string &text) {
    if (char *real = realpath(path.c_str(), nullptr)) {
        path = real;
        free(real);
    }
    const mode_t mode = state_of(path).st_mode;
    const bool direct = mode && !S_ISREG(mode);
    string part = direct ? path : path + ".XXXXXX";
    const int fd = direct ? open(path.c_str(), O_WRONLY | O_CLOEXEC) : mkostemp(&part[0], O_CLOEXEC); // 0600
    if (fd < 0)
        return errno;
    int problem = 0;
    for (size_t at = 0; at < text.size() && !problem;) {
        const ssize_t n = write(fd, &text[at], text.size() - at);
        if (n >= 0)
            at += size_t(n);
        else if (errno != EINTR || caught)
            problem = errno;
    }
    if (!direct && !problem && fsync(fd) < 0)
        problem = errno;
    if (close(fd) < 0 && !problem)
        problem = errno;
    if (!direct && !problem && rename(part.c_str(), path.c_str()) < 0)
        problem = errno;
    if (!direct && problem)
        unlink(part.c_str());
    return problem;
}

bool is_blank(const string &s) { return s.find_first_not_of(" \t\r\n\v\f") == string::npos; }

void drop_newline(string &s) {
    if (!s.empty() && s.back() == '\n') {
        s.pop_back();
        if (!s.empty() && s.back() == '\r')
            s.pop_back();
    }
}

// Messages end at a NUL, so there it becomes U+FFFD.
string without_nul(const string &s) {
    string out;
    for (char c : s)
        c ? out += c : out += "\xef\xbf\xbd";
    return out;
}

// ---------------------------------------------------------------------------------------------------
// 6. MODEL
//
// A model, the session on it, and the calls that fill a buffer. Invariant: a call that fails has printed the
// library's message and thrown.
// ---------------------------------------------------------------------------------------------------

// 1230000000 as "1.23 G".
string scaled(double x, const char *unit) {
    const char *const prefix[] = {"", "k", "M", "G", "T"};
    int i = 0;
    for (; x >= 1000 && i < 4; i++)
        x /= 1000;
    return strf("%.*f %s%s", i ? 2 : 0, x, prefix[i], unit);
}

// Every fact once: its JSON name, its JSON value, and, where people get to see it, a label and a text.
struct fact {
    const char *key;
    string value;
    const char *label; // null: only in the JSON
    string text;
};

vector<fact> facts_of(const engine_model_info &i) {
    const auto num = [](double x) { return strf("%.0f", x); };
    const auto bytes = [](int64_t x) { return scaled(double(x), "B"); };
    const int64_t kv_full = i.kv_token_bytes * i.n_ctx_train;
    return {
        {"name", json_string(i.name), "name", i.name},
        {"arch", json_string(i.arch), "architecture", i.arch},
        {"n_params", num(double(i.n_params)), "parameters", scaled(double(i.n_params), "")},
        {"weight_bytes", num(double(i.weight_bytes)), "weights", bytes(i.weight_bytes) + ", " + i.types},
        {"types", json_string(i.types), nullptr, ""},
        {"n_layer", num(i.n_layer), "layers", num(i.n_layer)},
        {"n_embd", num(i.n_embd), "embedding", num(i.n_embd)},
        {"n_ff", num(i.n_ff), "feed-forward", num(i.n_ff)},
        {"n_head", num(i.n_head), "heads",
         strf("%d of %d values, %d for keys and values", i.n_head, i.head_dim, i.n_head_kv)},
        {"n_head_kv", num(i.n_head_kv), nullptr, ""},
        {"head_dim", num(i.head_dim), nullptr, ""},
        {"tokenizer", json_string(i.tokenizer), "tokenizer",
         strf("%s, %d tokens, BOS %d%s, EOS %d", i.tokenizer, i.n_vocab, i.bos, i.add_bos ? " (added)" : "", i.eos)},
        {"n_vocab", num(i.n_vocab), nullptr, ""},
        {"bos", num(i.bos), nullptr, ""},
        {"eos", num(i.eos), nullptr, ""},
        {"add_bos", i.add_bos ? "true" : "false", nullptr, ""},
        {"has_template", i.has_template ? "true" : "false", "chat template", i.has_template ? "yes" : "no"},
        {"n_ctx_train", num(i.n_ctx_train), "context", num(i.n_ctx_train) + " tokens"},
        {"kv_token_bytes", num(double(i.kv_token_bytes)), "KV cache",
         bytes(i.kv_token_bytes) + " per token, " + bytes(kv_full) + " for the whole context"},
        {"kv_bytes", num(double(kv_full)), nullptr, ""},
        {"decode_bytes", num(double(i.decode_bytes)), "one token reads", bytes(i.decode_bytes) + " of weights"},
        {"n_window", num(i.n_window), i.n_window ? "window" : nullptr, num(i.n_window) + " tokens, in some layers"},
        {"backend", json_string(i.backend), "runs on", i.backend + strf(", %d threads", i.threads)},
        {"threads", num(i.threads), nullptr, ""},
        {"generic_ops", json_string(i.generic_ops), "generic path", *i.generic_ops ? i.generic_ops : "none"},
    };
}

double per_second(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

engine_open_options open_options() {
    engine_open_options o = {};
    o.size = sizeof o;
    o.threads = opt.threads;
    o.no_mmap = opt.no_mmap;
    return o;
}

engine_session_options session_options(int ctx) {
    engine_session_options o = {};
    o.size = sizeof o;
    o.n_ctx = ctx; // 0: the library's choice
    o.chunk = opt.chunk;
    o.kv = opt.kv;
    return o;
}

struct opened {
    engine_model *model = nullptr;
    engine_session *session = nullptr;
    engine_model_info info = {};
    engine_error err = {};
    bool plain = true;  // text is completed as it is, no template is used
    int from_model = 0; // the model's metadata has defaults for sampling
    uint64_t drawn_seed = UINT64_MAX;
    string template_text;
    vector<std::pair<string, string>> template_args; // name, JSON

    opened() {
        const engine_open_options open_opt = open_options();
        check(engine_open(&model, opt.model, &open_opt, &err));
        info.size = sizeof info;
        check(engine_info(model, &info, &err));
    }
    opened(const opened &) = delete;
    ~opened() {
        computing = nullptr;
        if (session)
            engine_session_free(session);
        engine_close(model);
    }

    // Passes on what is no failure.
    int check(int n) const {
        if (n == ENGINE_ECANCELLED && caught)
            throw quit{128 + caught};
        if (n < 0)
            fail(EXIT_ERROR, "%s", err.msg);
        return n;
    }

    // ctx 0: the library's choice.
    void start(int ctx) {
        const engine_session_options session_opt = session_options(ctx);
        check(engine_session_new(&session, model, &session_opt, &err));
        computing = session;
        if (verbosity < 2)
            return;
        for (const fact &f : facts_of(info))
            if (f.label)
                note("%-16s %s", f.label, f.text.c_str());
        note("%-16s %d tokens, %s", "context in use", engine_session_ctx(session), context_reason(ctx).c_str());
    }
    // Why the context has its size.
    string context_reason(int asked) const {
        const int n = engine_session_ctx(session);
        if (asked)
            return n > info.n_ctx_train ? strf("more than the %d that the model was trained for", info.n_ctx_train)
                                        : strf("of %d that the model was trained for", info.n_ctx_train);
        return n < info.n_ctx_train ? strf("as many as memory allows of %d trained", info.n_ctx_train)
                                    : "as the model was trained";
    }

    vector<int32_t> tokenize(const string &text, int flags) {
        return fill<vector<int32_t>>(text.size() / 2 + 64, 0, [&](int32_t *out, size_t cap) {
            return engine_tokenize(model, text.data(), text.size(), flags, out, cap, &err);
        });
    }
    // Messages, or a conversation as JSON.
    vector<int32_t> render(const vector<engine_message> &messages, const char *json) {
        size_t guess = json ? strlen(json) / 2 : 64;
        for (const engine_message &m : messages)
            guess += strlen(m.content) / 2 + 64;
        vector<engine_template_arg> args;
        for (const auto &a : template_args)
            if (!opt.answer.think || a.first != "enable_thinking")
                args.push_back({a.first.c_str(), a.second.c_str()});
        if (opt.answer.think)
            args.push_back({"enable_thinking", strcmp(opt.answer.think, "on") == 0 ? "true" : "false"});
        engine_chat_options chat_opt = {};
        chat_opt.size = sizeof chat_opt;
        chat_opt.template_text = opt.template_file ? template_text.c_str() : nullptr;
        chat_opt.messages_json = json;
        chat_opt.args = args.data();
        chat_opt.n_args = args.size();
        return fill<vector<int32_t>>(guess, 0, [&](int32_t *out, size_t cap) {
            const int n =
                engine_render_chat(model, json ? nullptr : messages.data(), messages.size(), &chat_opt, out, cap, &err);
            const char *field = "messages_json"; // what the user knows as a file
            if (n < 0 && json && strncmp(err.msg, field, strlen(field)) == 0)
                fail(EXIT_ERROR, "%s%s", strcmp(opt.messages, "-") == 0 ? "standard input" : opt.messages,
                     err.msg + strlen(field));
            return n;
        });
    }
    vector<int32_t> timeline() {
        return fill<vector<int32_t>>(4096, 0,
                                     [&](int32_t *out, size_t cap) { return engine_tokens(session, out, cap); });
    }
    string detokenize(const vector<int32_t> &ids, bool special) {
        return fill<string>(ids.size() * 8 + 64, 1, [&](char *out, size_t cap) {
            return engine_detokenize(model, ids.data(), ids.size(), special, out, cap, &err);
        });
    }
    string piece(int32_t id) {
        return fill<string>(64, 1, [&](char *out, size_t cap) { return engine_piece(model, id, 1, out, cap, &err); });
    }
    string meta(const char *key) {
        return fill<string>(4096, 1, [&](char *out, size_t cap) { return engine_meta(model, key, out, cap, &err); });
    }
    engine_session_stats stats() {
        engine_session_stats s = {};
        s.size = sizeof s;
        check(engine_stats(session, &s, &err));
        return s;
    }
    string session_note() {
        return fill<string>(4096, 1, [&](char *out, size_t cap) { return engine_note(session, out, cap); });
    }

    // The model's own template is looked at for what the options of templates mean to it.
    void read_template() {
        if (opt.template_file)
            template_text = read_text(opt.template_file);
        else if (info.has_template)
            template_text = meta("tokenizer.chat_template");
        if (opt.template_file && template_text.find('\0') != string::npos)
            fail(EXIT_ERROR, "%s: a NUL byte in a chat template", opt.template_file);
        plain = opt.raw || (!info.has_template && !opt.template_file);
        for (const char *arg : opt.template_args) {
            const char *equals = strchr(arg, '=');
            if (!equals || equals == arg)
                fail(EXIT_USAGE, "--template-arg: '%s' is not NAME=VALUE", arg);
            const string name(arg, equals), value(equals + 1);
            template_args.push_back({name, is_json(value.c_str()) ? value : json_string(value)});
            check_template_knows("--template-arg " + name, name);
        }
        if (opt.answer.think)
            check_template_knows("--think", "enable_thinking");
    }
    void check_template_knows(const string &option, const string &variable) const {
        if (plain)
            note("%s has no effect: no chat template is used", option.c_str());
        else if (template_text.find(variable) == string::npos)
            note("%s has no effect: the chat template does not mention %s", option.c_str(), variable.c_str());
    }

    // The settings anew: the model's defaults, then what was given, in its order.
    void apply_settings() {
        answer_settings &a = opt.answer = answer_settings();
        a.sampling.size = sizeof a.sampling;
        check(engine_sampling_defaults(model, &a.sampling, &from_model, &err));
        a.sampling.seed = UINT64_MAX;
        string range;
        for (setting &s : opt.given)
            if (s.row->commands & SETTABLE)
                store_option(*s.row, s.value.c_str(), range);
        if (a.sampling.seed == UINT64_MAX)
            a.sampling.seed = drawn_seed;
        for (const engine_logit_bias &b : a.bias)
            if (b.id >= info.n_vocab)
                fail(EXIT_ERROR, "--logit-bias: there is no token %d: this model has %d", b.id, info.n_vocab);
    }
    // Other settings in place of those that were given. When they cannot be had, the old ones stay.
    void replace_settings(std::list<setting> next) {
        opt.given.swap(next);
        try {
            apply_settings();
        } catch (const quit &) {
            opt.given.swap(next);
            apply_settings();
            throw;
        }
    }
    // A seed that the user gave is kept with a session, one that was drawn is not.
    void set_seed(uint64_t seed) {
        opt.answer.sampling.seed = drawn_seed = seed;
        for (setting &s : opt.given)
            if (s.row == settable("seed") && s.value != "-1")
                s.value = std::to_string(seed);
    }
    // 32 random bits, short enough to be typed again, where no seed was given.
    void draw_seed() {
        if (opt.answer.sampling.seed == UINT64_MAX)
            set_seed(std::random_device{}());
    }

  private:
    // Calls get(data, capacity) until all that it has to give fits, with room for `extra` items more (a NUL).
    template <class T, class F> T fill(size_t guess, size_t extra, F get) const {
        for (T out;;) {
            out.resize(guess);
            const size_t n = size_t(check(get(out.data(), out.size())));
            guess = n + extra;
            if (guess <= out.size()) {
                out.resize(n);
                return out;
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------
// 7. CONVERSATION
//
// The messages, rendered anew for every answer (engine_sync finds what the session already holds), and the note in a
// session's file that keeps them: strings that end with NUL, the first is the version, then come records of three
// (what, name, text). Invariant: a note is taken whole or not at all.
// ---------------------------------------------------------------------------------------------------

struct chat_message {
    string role, content;
};

const char note_version[] = "engine conversation 1";

struct conversation {
    string system;
    bool has_system = false;
    vector<chat_message> messages; // without the system message

    // What the model gets: the template's work, or the text itself. There, what comes after an answer is a new line.
    vector<int32_t> ids(opened &m) const {
        if (m.plain) {
            string text;
            for (size_t i = 0; i < messages.size(); i++)
                text += (i && messages[i - 1].role == "assistant" ? "\n" : "") + messages[i].content;
            return m.tokenize(text, ENGINE_ADD_BOS | (opt.raw ? ENGINE_PARSE_SPECIAL : 0));
        }
        vector<engine_message> list;
        if (has_system)
            list.push_back({"system", system.c_str()});
        for (const chat_message &c : messages)
            list.push_back({c.role.c_str(), c.content.c_str()});
        return m.render(list, nullptr);
    }

    string json() const {
        vector<chat_message> all = messages;
        if (has_system)
            all.insert(all.begin(), {"system", system});
        return json_list(all.data(), all.size(),
                         [](const chat_message &c) {
                             return "\n{\"role\":" + json_string(c.role) + ",\"content\":" + json_string(c.content) +
                                    "}";
                         }) +
               "\n";
    }

    // The last message, when it is an answer, is taken away and returned.
    bool take_answer(chat_message &answer) {
        if (messages.empty() || messages.back().role != "assistant")
            return false;
        answer = std::move(messages.back());
        messages.pop_back();
        return true;
    }

    void drop_unanswered() {
        if (messages.empty() || messages.back().role != "user")
            return;
        messages.pop_back();
        note("the message before, which got no answer, is dropped");
    }

    string describe() const { return counted(int64_t(messages.size()), "message"); }

    string note_bytes() const {
        string out;
        const auto put = [&out](const string &s) { out += s + '\0'; };
        const auto record = [&](const char *what, const string &name, const string &text) {
            put(what), put(name), put(text);
        };
        put(note_version);
        if (has_system)
            record("system", "", system);
        for (const setting &s : opt.given)
            if (is_kept(*s.row) && (s.row->target.kind != SEED || s.value != "-1"))
                record("set", s.row->name, s.value);
        for (const chat_message &c : messages)
            record("message", c.role, c.content);
        return out;
    }

    void save(opened &m, const string &path) const {
        check_replaceable(path, "session", {"engsess\n"});
        const string bytes = note_bytes();
        m.check(engine_set_note(m.session, bytes.data(), bytes.size(), &m.err));
        if (engine_save(m.session, path.c_str(), &m.err) == 0)
            return;
        const string reason = m.err.msg, part = ".part: "; // the user knows the file, not the name it is made under
        const size_t at = reason.rfind(part);
        if (at == string::npos)
            fail(EXIT_ERROR, "%s", reason.c_str());
        fail(EXIT_ERROR, "%s: %s", path.c_str(), reason.c_str() + at + part.size());
    }

    // Takes a session's file: timeline, conversation and settings (which are applied). With `options_win`, what the
    // command line gave stays. Returns false when the file has tokens only.
    bool load(opened &m, const char *path, bool options_win) {
        m.check(engine_load(m.session, path, &m.err));
        const string note = m.session_note();
        vector<string> parts;
        for (size_t at = 0, end; (end = note.find('\0', at)) != string::npos; at = end + 1)
            parts.push_back(note.substr(at, end - at));
        if (note.empty())
            return false;
        const string known(note_version, strlen(note_version) - 1);
        if (parts.empty() || parts[0].compare(0, known.size(), known) != 0)
            fail(EXIT_ERROR, "%s: its note is no conversation of this program", path);
        if (parts[0] != note_version)
            fail(EXIT_ERROR, "%s: its conversation has another version (%.40s; this program knows %s)", path,
                 parts[0].c_str(), note_version);
        conversation next;
        std::list<setting> settings;
        bool good = note.back() == '\0' && parts.size() % 3 == 1;
        for (size_t i = 1; good && i < parts.size(); i += 3) {
            const string &what = parts[i], &name = parts[i + 1], &text = parts[i + 2];
            if (what == "system" && name.empty() && !next.has_system)
                next.has_system = true, next.system = text;
            else if (what == "message" && (name == "user" || name == "assistant"))
                next.messages.push_back({name, text});
            else if (what == "set" && settable(name))
                settings.push_back({settable(name), text}); // what is not kept any more is dropped below
            else
                good = false;
        }
        string range;
        for (const setting &s : settings)
            good = good && store_option(*s.row, s.value.c_str(), range);
        m.apply_settings(); // what the check has left behind goes
        if (!good)
            fail(EXIT_ERROR, "%s: its conversation is damaged", path);
        settings.remove_if([](const setting &s) { return !is_kept(*s.row); });
        m.replace_settings(merge_settings(settings, options_win));
        *this = std::move(next);
        return true;
    }

  private:
    static std::list<setting> merge_settings(std::list<setting> of_file, bool options_win) {
        std::list<setting> merged = opt.given;
        if (options_win)
            of_file.remove_if([](const setting &s) {
                return std::any_of(opt.given.begin(), opt.given.end(),
                                   [&s](const setting &given) { return s.row == given.row; });
            });
        else
            merged.remove_if([](const setting &s) { return is_kept(*s.row); });
        merged.splice(merged.begin(), of_file);
        return merged;
    }
};

// The file that a conversation lives in, and what it was when it was read or written last. When another process has
// written it since, that stays, and this conversation goes to FILE.1 or the next free number.
struct session_file {
    string path;        // "": none
    bool moved = false; // the conversation is not where the user wanted it
    struct stat seen;   // all zeros: there was none
    string written;     // its note

    session_file() : session_file("") {}
    explicit session_file(const string &name) : path(name), seen(state_of(name)) {}

    bool is(const struct stat &other) const { return seen.st_ino == other.st_ino && seen.st_dev == other.st_dev; }
    bool changed() const {
        const struct stat now = state_of(path);
        return now.st_nlink && !(is(now) && seen.st_size == now.st_size && seen.st_mtim.tv_sec == now.st_mtim.tv_sec &&
                                 seen.st_mtim.tv_nsec == now.st_mtim.tv_nsec);
    }
    void note_state(const string &note) { seen = state_of(path), written = note; }

    // Nothing happens when the file has it all.
    void save(opened &m, const conversation &talk) {
        const string note = talk.note_bytes();
        const bool nothing_new = note == written || (written.empty() && talk.messages.empty());
        if (path.empty() || (nothing_new && state_of(path).st_nlink))
            return;
        // The folder's lock keeps two of these programs apart from the look at the file until it is written, and
        // leaves nothing behind. Someone else's lock on it is not waited for longer than a save could take.
        const size_t slash = path.rfind('/');
        const int folder = open(slash == string::npos ? "." : path.substr(0, slash + 1).c_str(), O_RDONLY | O_CLOEXEC);
        for (int i = 0; folder >= 0 && flock(folder, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK && i < 200; i++)
            poll(nullptr, 0, 50);
        try {
            if (changed()) {
                const string old = path;
                struct stat st;
                for (int i = 1; i == 1 || lstat(path.c_str(), &st) == 0; i++)
                    path = old + "." + std::to_string(i);
                moved = true;
                tell("engine: %s: another process has written it; this conversation goes to %s\n", old.c_str(),
                     path.c_str());
            }
            talk.save(m, path);
            note_state(note);
        } catch (const quit &) {
            close(folder);
            throw;
        }
        close(folder);
    }
};

// ---------------------------------------------------------------------------------------------------
// 8. ANSWER
//
// Tokens in, streamed text and one line of statistics out; the same for run and chat.
// ---------------------------------------------------------------------------------------------------

struct answer {
    bool stream; // write the text as it comes
    double start = 0, first_text = 0;
    string text, reasoning;
    bool in_reasoning = false;
    int write_code = 0; // errno of stdout
    int code = 0;       // ENGINE_E*
    engine_error err = {};
    engine_result result = {};

    explicit answer(bool to_stdout) : stream(to_stdout) {}

    // To where reasoning is wanted.
    void show_reasoning(const char *s, size_t len) {
        if (strcmp(opt.answer.reasoning, "tagged") == 0)
            write_code = write_out(s, len);
        else if (strcmp(opt.answer.reasoning, "stderr") == 0 && verbosity >= 1)
            tell("%.*s", int(len), s);
    }
    void switch_to(bool to_reasoning) {
        if (!first_text)
            first_text = now_seconds();
        const char *mark = to_reasoning ? "<think>\n" : "\n</think>\n";
        if (stream && in_reasoning != to_reasoning)
            show_reasoning(mark, strlen(mark));
        in_reasoning = to_reasoning;
    }
    static int on_text(void *user, const char *s, size_t len) {
        answer &a = *static_cast<answer *>(user);
        a.switch_to(false);
        a.text.append(s, len);
        if (a.stream && !a.write_code)
            a.write_code = write_out(s, len);
        return a.write_code;
    }
    static int on_reasoning(void *user, const char *s, size_t len) {
        answer &a = *static_cast<answer *>(user);
        a.switch_to(true);
        a.reasoning.append(s, len);
        if (a.stream && !a.write_code)
            a.show_reasoning(s, len);
        return a.write_code;
    }
    bool interrupted() const { return code == ENGINE_ECANCELLED || write_code == EINTR; }
    bool failed() const { return code < 0 && !interrupted() && !write_code; }
    void leave_if_unwritten() const {
        if (write_code && write_code != EINTR)
            leave_unwritten(write_code);
    }
    bool context_full() const { return code == 0 && result.reason == ENGINE_STOP_CONTEXT; }
    const char *finish_reason() const {
        static const char *const names[] = {"stop", "length", "context", "stop_string"}; // ENGINE_STOP_*
        return interrupted() ? "cancelled" : names[result.reason];
    }
};

void make_answer(opened &m, const vector<int32_t> &ids, answer &a) {
    progress bar{"prefill"};
    if (bar_wanted())
        engine_on_progress(m.session, progress::report, &bar);
    a.start = now_seconds();
    a.code = engine_sync(m.session, ids.data(), ids.size(), &a.err);
    if (a.code == ENGINE_ECANCELLED && !caught) // by a signal that came just after the last answer
        a.code = engine_sync(m.session, ids.data(), ids.size(), &a.err);
    engine_on_progress(m.session, nullptr, nullptr);
    erase_bar();
    if (a.code >= 0 && caught)
        a.code = ENGINE_ECANCELLED; // the signal came as the prefill ended
    answer_settings &set = opt.answer;
    engine_sampling sampling = set.sampling;
    sampling.bias = set.bias.empty() ? nullptr : set.bias.data();
    sampling.n_bias = set.bias.size();
    sampling.dry_breakers = set.dry_breakers.empty() ? nullptr : set.dry_breakers.data();
    sampling.n_dry_breakers = set.dry_breakers.size();
    engine_generate_options gen = {};
    gen.size = sizeof gen;
    gen.sampling = &sampling;
    gen.max_tokens = std::max(set.max_tokens, 0);
    gen.stops = set.stops.empty() ? nullptr : set.stops.data();
    gen.n_stops = set.stops.size();
    gen.ignore_end = set.ignore_eos;
    gen.on_reasoning = m.plain ? nullptr : answer::on_reasoning;
    if (a.code >= 0)
        a.code = engine_generate(m.session, &gen, answer::on_text, &a, &a.result, &a.err);
    if (a.in_reasoning && !a.write_code)
        a.switch_to(false);
}

void print_statistics(opened &m, const answer &a) {
    const engine_session_stats s = m.stats();
    const int64_t done = std::min(s.prompt_tokens, s.n_tokens); // less than the prompt when that was interrupted
    string line = "prompt " + (done < s.prompt_tokens ? strf("%lld of ", (long long)done) : "") +
                  strf("%s (%lld reused)", counted(s.prompt_tokens, "token").c_str(), (long long)s.reused_tokens);
    if (a.first_text)
        line += strf(", TTFT %.3f s", a.first_text - a.start);
    if (done > s.reused_tokens && s.prefill_seconds > 0)
        line += strf(", prefill %.1f tok/s", double(done - s.reused_tokens) / s.prefill_seconds);
    line += strf(" | answer %s (%s)", counted(a.result.n_tokens, "token").c_str(), a.finish_reason());
    if (a.result.n_reasoning)
        line += strf(", %d of them reasoning", a.result.n_reasoning);
    if (s.decode_tokens)
        line += strf(", ITL p50 %.2f p99 %.2f ms, decode %.1f tok/s, %.2f GB/s", s.itl_p50 * 1e3, s.itl_p99 * 1e3,
                     per_second(double(s.decode_tokens), s.decode_seconds),
                     per_second(double(s.decode_bytes) * 1e-9, s.decode_seconds));
    if (opt.answer.sampling.temperature > 0)
        line += strf(" | seed %llu", (unsigned long long)opt.answer.sampling.seed);
    note("%s", line.c_str());
}

string answer_json(opened &m, const answer &a, size_t n_prompt) {
    const engine_session_stats s = m.stats();
    vector<int32_t> ids = m.timeline();
    ids.erase(ids.begin(), ids.begin() + ptrdiff_t(std::min(n_prompt, ids.size())));
    string out = "{\"text\":" + json_string(a.text);
    if (!a.reasoning.empty())
        out += ",\"reasoning\":" + json_string(a.reasoning);
    out += ",\"ids\":" + json_ids(ids);
    out += strf(",\"finish_reason\":\"%s\",\"prompt_tokens\":%zu,\"reused_tokens\":%lld", a.finish_reason(), n_prompt,
                (long long)s.reused_tokens);
    out += ",\"seed\":" + (opt.answer.sampling.temperature > 0 ? std::to_string(opt.answer.sampling.seed) : "null");
    out += ",\"ttft_s\":" + (a.first_text ? json_number(a.first_text - a.start) : "null");
    out += ",\"prefill_s\":" + json_number(s.prefill_seconds) + ",\"decode_s\":" + json_number(s.decode_seconds);
    out += ",\"decode_tokens\":" + std::to_string(s.decode_tokens) + ",\"itl_p50_s\":" + json_number(s.itl_p50);
    return out + ",\"itl_p99_s\":" + json_number(s.itl_p99) + "}\n";
}

// ---------------------------------------------------------------------------------------------------
// 9. RUN
//
// One answer to what the arguments and stdin make together.
// ---------------------------------------------------------------------------------------------------

const char no_prompt[] = "no prompt: give -p TEXT, -f FILE or text on standard input (to talk: engine chat MODEL)";

// Joins the parts that say anything with a blank line between them. Without any, `missing` is the message.
string read_prompt(const char *missing) {
    string parts[3], prompt;
    if (opt.prompt)
        parts[0] = opt.prompt;
    if (opt.file)
        parts[1] = read_input(opt.file);
    if (!isatty(0) && !(opt.file && strcmp(opt.file, "-") == 0)) {
        pollfd p = {0, POLLIN, 0};
        if ((opt.prompt || opt.file) && poll(&p, 1, 3000) == 0)
            note("waiting for the end of standard input; use < /dev/null when there is none");
        parts[2] = read_input("-");
    }
    drop_newline(parts[1]);
    drop_newline(parts[2]);
    for (const string &part : parts)
        if (!is_blank(part))
            prompt += (prompt.empty() ? "" : "\n\n") + part;
    if (prompt.empty() && opt.raw && opt.prompt)
        return opt.prompt; // given as it is, blanks and all: a model may begin with nothing but its BOS
    if (prompt.empty())
        fail(EXIT_USAGE, "%s", missing);
    return prompt;
}

void print_logits(opened &m, const vector<int32_t> &ids) {
    const float *logits;
    m.check(engine_sync(m.session, ids.data(), ids.size(), &m.err));
    leave_if_caught();
    const int n = m.check(engine_logits(m.session, &logits, &m.err));
    print(strf("{\"n_vocab\":%d,\"prompt_ids\":", n) + json_ids(ids) +
          ",\"logits\":" + json_list(logits, size_t(n), [](float x) { return json_number(double(x)); }) + "}\n");
}

// The conversation as the arguments, stdin and the session's file make it; its ids are what the model gets.
vector<int32_t> prompt_ids(opened &m, conversation &talk, const string &text) {
    if (opt.messages) {
        if (!talk.messages.empty())
            fail(EXIT_ERROR, "%s holds a conversation of %s, and --messages brings its own: give another --session",
                 opt.session, talk.describe().c_str());
        return m.render({}, text.c_str());
    }
    if (opt.system)
        talk.has_system = true, talk.system = opt.system;
    if (m.plain && talk.has_system)
        fail(EXIT_ERROR, "%s, so %s cannot be used with it",
             opt.raw ? "--raw uses no chat template" : (opt.model + string(" has no chat template")).c_str(),
             opt.system ? "a system message" : (opt.session + string(", which has a system message,")).c_str());
    if (m.plain && !opt.raw)
        note("%s has no chat template: completing the text as it is", opt.model);
    talk.drop_unanswered();
    talk.messages.push_back({"user", text});
    const vector<int32_t> ids = talk.ids(m);
    if (ids.empty())
        fail(EXIT_USAGE, "no prompt: the text makes no token");
    return ids;
}
// The session's file is there already. When it cannot be written in the end, that shows before the work.
bool session_exists() {
    struct stat st;
    if (!opt.session)
        return false;
    const char *slash = strrchr(opt.session, '/');
    const string folder = slash ? string(opt.session, slash + 1) : ".";
    if (access(folder.c_str(), W_OK | X_OK) < 0)
        fail(EXIT_ERROR, "%s: %s: %s", opt.session, folder.c_str(), strerror(errno));
    return stat(opt.session, &st) == 0 || errno != ENOENT;
}

// Also what chat does when it is not on a terminal.
void answer_once(const char *missing) {
    if (opt.raw && opt.system)
        fail(EXIT_USAGE, "--raw uses no chat template, so it cannot be used with -s/--system");
    if (opt.messages && (opt.prompt || opt.file || opt.system || opt.raw))
        fail(EXIT_USAGE, "--messages is a whole conversation, so it cannot be used with -p, -f, -s or --raw");
    if (!opt.prompt && !opt.file && !opt.messages && isatty(0))
        fail(EXIT_USAGE, "%s", missing);
    for (const setting &s : opt.given)
        if (opt.logits && s.row->commands & SHAPES_ANSWER)
            note("--logits gives no answer: %s has no effect", option_label(*s.row).c_str());
    opened m;
    m.read_template();
    string text = opt.messages ? read_input(opt.messages) : read_prompt(missing);
    if (opt.messages) {
        drop_byte_order_mark(text);
        const string wrong = text.find('\0') != string::npos ? "a NUL byte in JSON" : wrong_messages(text.c_str());
        if (!wrong.empty())
            fail(EXIT_ERROR, "%s: %s", strcmp(opt.messages, "-") == 0 ? "standard input" : opt.messages, wrong.c_str());
    }
    if (!m.plain || opt.session) // with a session it becomes a part of the note
        text = without_nul(text);
    const bool old = session_exists();
    m.apply_settings();
    m.start(opt.ctx);
    conversation talk;
    session_file file(opt.session ? opt.session : "");
    if (old)
        talk.load(m, opt.session, true);
    m.draw_seed();
    const vector<int32_t> ids = prompt_ids(m, talk, text);
    const int ctx = engine_session_ctx(m.session);
    if (ids.size() > size_t(ctx))
        fail(EXIT_ERROR, "the prompt has %zu tokens and exceeds the available context size of %d tokens (-c)",
             ids.size(), ctx);
    if (opt.logits)
        return print_logits(m, ids);

    answer a(!opt.json);
    make_answer(m, ids, a);
    const string end = a.failed()                       ? ""
                       : opt.json                       ? answer_json(m, a, ids.size())
                       : a.code == 0 || !a.text.empty() ? "\n"
                                                        : "";
    if (!a.write_code)
        a.write_code = write_out(end.data(), end.size());
    if (a.failed())
        fail(EXIT_ERROR, "%s", a.err.msg);
    if (a.context_full())
        note("stopped: the context of %d tokens is full", ctx);
    if (!a.write_code || a.interrupted())
        print_statistics(m, a);
    if (opt.session) { // what no one reads any more is a part of the conversation as well
        if (a.interrupted() && a.text.empty() && !talk.messages.empty())
            talk.messages.pop_back(); // the message without an answer
        else if (!opt.messages)
            talk.messages.push_back({"assistant", without_nul(a.text)});
        file.save(m, talk);
    }
    a.leave_if_unwritten();
    leave_if_caught();
    if (file.moved)
        throw quit{EXIT_ERROR};
}

void cmd_run() { answer_once(no_prompt); }

// ---------------------------------------------------------------------------------------------------
// 10. LINES
//
// Reads lines from the terminal, and messages made of them: through libedit where the build has it, with history and
// completion, else as the terminal gives them. Invariant: a signal and the end of the input are never lost.
// ---------------------------------------------------------------------------------------------------

// The commands of the chat: a line that begins with one is no message.
enum chat_command { CLEAR, REGEN, UNDO, COMPACT, SYSTEM, SET, THINK, SAVE, LOAD, EXPORT, READ, STATS, HELP, LEAVE };
struct chat_command_row {
    chat_command command;
    const char *name, *argument; // argument: null for none, in brackets when it may be left out
    const char *help;            // null: another name of the one before
    bool takes_file() const { return argument && strcmp(argument, "FILE") == 0; }
    bool needs_argument() const { return argument && *argument != '['; }
};
const chat_command_row chat_commands[] = {
    {HELP, "/help", nullptr, "this text"},
    {HELP, "/?", nullptr, nullptr},
    {CLEAR, "/clear", nullptr, "forget the conversation (the system message stays)"},
    {REGEN, "/regen", nullptr, "answer the last message again, with the next seed"},
    {UNDO, "/undo", nullptr, "take back the last message and its answer"},
    {COMPACT, "/compact", "[N]", "drop the N oldest turns; without N, until half the context is free"},
    {SYSTEM, "/system", "[TEXT]", "set the system message; alone: show it; /system - removes it"},
    {SET, "/set", "[KEY VALUE]", "change a setting, or back with VALUE default; alone: list them"},
    {THINK, "/think", "[on|off]", "ask for reasoning, or for none; alone: show it"},
    {SAVE, "/save", "FILE", "write conversation, settings and cache to a session file"},
    {LOAD, "/load", "FILE", "go on with one, in place of this conversation"},
    {EXPORT, "/export", "FILE", "write the conversation as JSON (run --messages reads it)"},
    {READ, "/read", "FILE", "send a file's text as the message"},
    {STATS, "/stats", nullptr, "tokens, memory and seed in use"},
    {LEAVE, "/exit", nullptr, "leave (also /bye, /quit, Ctrl-D)"},
    {LEAVE, "/bye", nullptr, nullptr},
    {LEAVE, "/quit", nullptr, nullptr},
};

struct line_reader {
    enum outcome { LINE, END, INTERRUPT };
    enum { PASTE_GAP = 50 }; // milliseconds of silence that end a paste
    bool had_text = false;   // INTERRUPT came with something typed, where that can be known
    bool ended = false;      // the end of the input was read, after `pending`
    string pending;          // read, and not yet taken
    string pasted;           // lines between a terminal's marks of a paste
    bool marks_pastes = false;
    bool typed_ahead = false; // `pending` was there before the prompt: lines of their own, unless marked

    // Reads what is there, until nothing comes for `gap` milliseconds.
    void fill(int gap) {
        char buf[4096];
        pollfd p = {0, POLLIN, 0};
        while (!ended && pending.size() < INPUT_LIMIT && poll(&p, 1, gap) > 0) {
            const ssize_t n = read(0, buf, sizeof buf);
            if (n > 0)
                pending.append(buf, size_t(n));
            else
                ended = n == 0 || (errno != EINTR && errno != EAGAIN);
        }
    }
    bool take_line(string &line) {
        const size_t end = pending.find_first_of("\r\n"); // libedit swaps the two
        if (end == string::npos)
            return false;
        line.assign(pending, 0, end);
        pending.erase(0, end + 1);
        return true;
    }

    // Waits for a key. Returns false when a signal came instead.
    static bool wait_key() {
        pollfd p[2] = {{0, POLLIN, 0}, {wake_pipe[0], POLLIN, 0}};
        while (!caught && !redraw) {
            if (poll(p, 2, -1) > 0 && p[0].revents && !p[1].revents)
                return true;
            char drain[64];
            while (read(wake_pipe[0], drain, sizeof drain) > 0)
                continue;
        }
        return false;
    }

    // A terminal without an editor hands over whole lines only, and of each no more than 4095 bytes; so the last line
    // of a paste, if it has no end, comes too late to belong to it.
    outcome read_plain(const char *prompt, string &line) {
        for (bool show = true; !take_line(line); fill(PASTE_GAP)) {
            if (ended) {
                ended = false;
                line.swap(pending);
                pending.clear();
                return line.empty() ? END : LINE;
            }
            const bool again = redraw.exchange(0);
            if ((show || again) && write_out(prompt, strlen(prompt)))
                return END;
            show = false;
            if (!wait_key() && caught)
                return INTERRUPT;
        }
        if (line.size() >= 4095)
            note("the terminal cuts a line at 4095 bytes; longer ones go through engine run -f");
        return LINE;
    }

#ifdef HAVE_LIBEDIT
    EditLine *editor = nullptr;
    History *history = nullptr;
    const char *prompt_text = "";

    static line_reader &of(EditLine *editor) {
        void *self = nullptr;
        el_get(editor, EL_CLIENTDATA, &self);
        return *static_cast<line_reader *>(self);
    }
    static char *show_prompt(EditLine *editor) { return const_cast<char *>(of(editor).prompt_text); }

    // A terminal that knows how puts marks around a paste. One line goes on as if it was typed; several end the line.
    bool begins_paste() const { return pending.compare(0, 6, "\x1b[200~") == 0; }
    bool paste_is_open() const {
        return begins_paste() && pending.find("\x1b[201~") == string::npos && pending.size() < INPUT_LIMIT;
    }
    void take_paste() {
        marks_pastes = true;
        const size_t end = std::min(pending.find("\x1b[201~"), pending.size());
        string text;
        for (size_t i = 6; i < end; i++) {
            const char c = pending[i], next = pending[i + 1 < end ? i + 1 : i];
            if (c == '\r' || c == '\n')
                text += '\n', i += next != c && (next == '\r' || next == '\n');
            else if ((unsigned char)c >= 32 || c == '\t')
                text += c;
        }
        pending.erase(0, end + 6);
        (text.find('\n') == string::npos ? pending : pasted).insert(0, text);
    }
    // While the model works, keys wait for the next prompt, unseen and not cut as the terminal's own editing would.
    static void quiet_terminal() {
        termios t;
        if (tcgetattr(0, &t) < 0)
            return;
        if (!terminal_changed)
            terminal_was = t, terminal_changed = true;
        t.c_lflag &= ~tcflag_t(ICANON | ECHO);
        t.c_cc[VMIN] = 1, t.c_cc[VTIME] = 0;
        tcsetattr(0, TCSANOW, &t);
    }
    void mark_pastes() const {
        if (!is_dumb && write_out("\x1b[?2004h", 8))
            return; // the next write says so
    }
    bool is_dumb = true; // the terminal
    int columns = 0;

    // libedit begins to draw wherever the cursor is, so that goes to the line's beginning first. How many rows that is
    // above depends on whether the terminal has wrapped anew: at least those of the larger width.
    void draw_again() {
        const int sig = redraw.exchange(0), before = columns;
        const LineInfo *line = el_line(editor);
        measure();
        size_t width = strlen(prompt_text);
        for (const char *c = line->buffer; c < line->cursor; c++)
            width += (*c & 0xc0) != 0x80;
        const size_t up = sig == SIGWINCH ? width / size_t(std::max(std::max(before, columns), 1)) : 0;
        const string home = is_dumb ? "\n" : up ? strf("\r\x1b[%zuA\x1b[J", up) : "\r\x1b[J";
        write_out(home.data(), home.size());
        if (sig == SIGCONT)
            mark_pastes();
        el_resize(editor);
        el_set(editor, EL_PREP_TERM, 1);
        el_set(editor, EL_REFRESH);
    }
    void measure() {
        winsize size;
        columns = ioctl(1, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
    }

    // libedit takes a key's sequence that it does not know for text. Those that it knows are bound here; of the others
    // what comes together with the escape is dropped. Returns true when it was.
    bool drop_unknown_key() {
        if (pending.size() < 2 || (pending[1] != '[' && pending[1] != 'O'))
            return false;
        size_t end = 2;
        if (pending[1] == 'O' || pending.compare(0, 3, "\x1b[[") == 0) // F1 is ESC O P, or on a console ESC [ [ A
            end += pending[1] == '[';
        else
            while (end < pending.size() && pending[end] >= 0x20 && pending[end] < 0x40)
                end++;
        const string key = pending.substr(0, end + 1);
        for (const auto &k : keys)
            if (key == k[0])
                return false;
        pending.erase(0, end + 1);
        return true;
    }
    static constexpr const char *keys[][2] = {
        {"\x1b[A", "ed-prev-history"}, {"\x1bOA", "ed-prev-history"},      {"\x1b[B", "ed-next-history"},
        {"\x1bOB", "ed-next-history"}, {"\x1b[C", "ed-next-char"},         {"\x1bOC", "ed-next-char"},
        {"\x1b[D", "ed-prev-char"},    {"\x1bOD", "ed-prev-char"},         {"\x1b[H", "ed-move-to-beg"},
        {"\x1bOH", "ed-move-to-beg"},  {"\x1b[1~", "ed-move-to-beg"},      {"\x1b[7~", "ed-move-to-beg"},
        {"\x1b[F", "ed-move-to-end"},  {"\x1bOF", "ed-move-to-end"},       {"\x1b[4~", "ed-move-to-end"},
        {"\x1b[8~", "ed-move-to-end"}, {"\x1b[3~", "ed-delete-next-char"}, {"\x1b[1;5C", "em-next-word"},
        {"\x1b[1;5D", "ed-prev-word"},
    };

    // libedit's source of characters: 1 for one, 0 at the end, -1 when a signal came. What follows a line is read
    // here, before libedit gives the terminal back its own line editing, which would cut it.
    static int next_character(EditLine *editor, wchar_t *out) {
        line_reader &self = of(editor);
        for (mbstate_t state = {};;) {
            while ((self.pending.empty() || self.paste_is_open()) && !self.ended) {
                if (wait_key()) {
                    self.fill(0);
                } else if (caught) {
                    const LineInfo *line = el_line(editor);
                    self.had_text = line->lastchar > line->buffer;
                    return -1;
                } else {
                    self.draw_again();
                }
            }
            if (self.pending.empty())
                return self.ended = false;
            if (self.pending[0] == '\x1b') { // a key's sequence ends with a letter or ~, mostly comes whole
                self.fill(self.pending.size() > 2 && self.pending.back() >= '@' ? 0 : PASTE_GAP / 2);
                if (self.paste_is_open() && !self.ended)
                    continue;
                if (self.begins_paste()) {
                    self.take_paste();
                    *out = '\n';
                    if (!self.pasted.empty())
                        return 1;
                    continue;
                }
                if (self.drop_unknown_key())
                    continue;
            }
            const size_t used = mbrtowc(out, &self.pending[0], 1, &state);
            self.pending.erase(0, 1);
            if (used == size_t(-2))
                continue;
            if (used == size_t(-1))
                *out = 0xfffd;
            if (*out == '\n' || *out == '\r')
                self.fill(self.marks_pastes ? 0 : PASTE_GAP);
            return 1;
        }
    }

    // libedit needs a locale that can encode what is typed.
    line_reader() {
        const bool utf8 = (setlocale(LC_CTYPE, "") && strcmp(nl_langinfo(CODESET), "UTF-8") == 0) ||
                          (setlocale(LC_CTYPE, "C.UTF-8") && strcmp(nl_langinfo(CODESET), "UTF-8") == 0);
        editor = utf8 ? el_init("engine", stdin, stdout, stderr) : nullptr;
        history = editor ? history_init() : nullptr;
        if (!history)
            return;
        HistEvent event;
        ::history(history, &event, H_SETSIZE, 1000);
        ::history(history, &event, H_SETUNIQUE, 1);
        el_set(editor, EL_CLIENTDATA, this);
        el_set(editor, EL_EDITOR, "emacs");
        el_set(editor, EL_PROMPT, show_prompt);
        el_set(editor, EL_HIST, ::history, history);
        el_set(editor, EL_GETCFN, next_character);
        for (const auto &k : keys)
            el_set(editor, EL_BIND, k[0], k[1], nullptr);
        el_set(editor, EL_ADDFN, "complete", "complete a command or a file's name, else insert a tab", complete);
        el_set(editor, EL_BIND, "^I", "complete", nullptr);
        catch_signal(SIGWINCH);
        find_history_file();
        load_history();
        const char *terminal = getenv("TERM");
        is_dumb = !terminal || !*terminal || strcmp(terminal, "dumb") == 0;
        quiet_terminal();
        mark_pastes();
    }
    ~line_reader() {
        if (editor)
            el_end(editor);
        if (history)
            history_end(history);
        restore_terminal();
    }

    // What TAB can put in place of `word`: commands at the beginning of a line, file names after one that takes them.
    static vector<string> candidates(const string &line, string &word) {
        vector<string> out;
        const size_t space = line.find(' ');
        if (space == string::npos) {
            word = line;
            for (const chat_command_row &c : chat_commands)
                if (strncmp(c.name, line.c_str(), line.size()) == 0)
                    out.push_back(string(c.name) + (c.argument ? " " : ""));
            return out;
        }
        bool takes_file = false;
        for (const chat_command_row &c : chat_commands)
            takes_file = takes_file || (c.takes_file() && c.name == line.substr(0, space));
        if (!takes_file)
            return out;
        const string path = line.substr(
            line.find_first_not_of(' ', space) == string::npos ? line.size() : line.find_first_not_of(' ', space));
        const size_t slash = path.rfind('/');
        const string folder = slash == string::npos ? "" : path.substr(0, slash + 1);
        word = path.substr(folder.size());
        if (DIR *dir = opendir(folder.empty() ? "." : user_path(folder).c_str())) {
            while (const dirent *entry = readdir(dir)) {
                const string name = entry->d_name;
                struct stat st;
                if (name.compare(0, word.size(), word) == 0 && (name[0] != '.' || !word.empty()))
                    out.push_back(
                        name + (stat((user_path(folder) + name).c_str(), &st) == 0 && S_ISDIR(st.st_mode) ? "/" : ""));
            }
            closedir(dir);
        }
        return out;
    }

    static unsigned char complete(EditLine *editor, int) {
        const LineInfo *info = el_line(editor);
        const string line(info->buffer, info->cursor);
        if (line.empty() || line[0] != '/')
            return el_insertstr(editor, "\t") < 0 ? CC_ERROR : CC_REFRESH;
        string word;
        vector<string> list = candidates(line, word);
        if (list.empty())
            return CC_REFRESH_BEEP;
        std::sort(list.begin(), list.end());
        string common = list[0];
        for (const string &c : list)
            common.erase(std::mismatch(common.begin(), common.end(), c.begin(), c.end()).first, common.end());
        while (!is_utf8(common)) // names that differ within a character
            common.pop_back();
        if (common.size() > word.size())
            return el_insertstr(editor, common.substr(word.size()).c_str()) < 0 ? CC_ERROR : CC_REFRESH;
        if (list.size() == 1)
            return CC_NORM;
        string shown = "\n";
        for (size_t i = 0; i < std::min<size_t>(list.size(), 100); i++)
            shown += list[i] + (list[i].back() == ' ' ? " " : "  ");
        tell("%s%s\n", shown.c_str(), list.size() > 100 ? "..." : "");
        return CC_REDISPLAY;
    }

    // ---- history: a file of lines to which each new one is appended ----
    enum { HISTORY_LINES = 1000 };
    string history_file; // "": none

    void find_history_file() {
        const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
        string folder = state && *state == '/' ? string(state) : "";
        if (folder.empty() && home && *home == '/')
            folder = string(home) + "/.local/state";
        if (folder.empty())
            return;
        folder += "/engine";
        for (size_t at = 1; at != string::npos;) { // a folder that cannot be made shows when the file is opened
            at = folder.find('/', at + 1);
            mkdir(folder.substr(0, at).c_str(), 0700);
        }
        history_file = folder + "/history";
    }
    void load_history() {
        const int fd = history_file.empty() ? -1 : open(history_file.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return;
        close(fd);
        string all;
        try {
            all = read_input(history_file.c_str(), false);
        } catch (const quit &) { // said, and no reason not to talk
            history_file.clear();
            return;
        }
        vector<size_t> starts = {0};
        for (size_t at = 0; (at = all.find('\n', at)) != string::npos;)
            starts.push_back(++at);
        const size_t lines = starts.size() - 1; // complete ones
        if (lines > 2 * HISTORY_LINES) {
            all.erase(0, starts[lines - HISTORY_LINES]);
            write_file(history_file, all);
        }
        HistEvent event;
        for (size_t at = 0, end; (end = all.find('\n', at)) != string::npos; at = end + 1)
            ::history(history, &event, H_ENTER, all.substr(at, end - at).c_str());
    }
    void remember(const string &line) {
        HistEvent event;
        ::history(history, &event, H_ENTER, line.c_str());
        const int fd = history_file.empty()
                           ? -1
                           : open(history_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
        const string text = line + "\n";
        if (!history_file.empty() && (fd < 0 || write(fd, text.data(), text.size()) < 0)) {
            note("%s: %s: the lines of this chat are not kept", history_file.c_str(), strerror(errno));
            history_file.clear();
        }
        if (fd >= 0)
            close(fd);
    }

    outcome read_edited(const char *prompt, string &line) {
        if (!typed_ahead && !marks_pastes && take_line(line)) { // of a paste: no one edits it, nothing has shown it
            string shown = prompt + line;
            for (char &c : shown)
                c = (unsigned char)c < 32 && c != '\t' ? '?' : c;
            shown += "\n";
            return write_out(shown.data(), shown.size()) ? END : LINE;
        }
        prompt_text = prompt;
        int n = 0;
        redraw = 0;
        measure();
        el_resize(editor);
        el_set(editor, EL_PREP_TERM, 1); // before the prompt shows, so that no key is taken the old way
        const char *text = el_gets(editor, &n);
        quiet_terminal();
        if (caught)
            return INTERRUPT;
        if (!text || n <= 0)
            return END;
        line.assign(text, size_t(n));
        drop_newline(line);
        if (!is_blank(line))
            remember(line);
        return LINE;
    }
#else
    line_reader() = default;
    outcome read_edited(const char *prompt, string &line) { return read_plain(prompt, line); }
    static constexpr void *history = nullptr;
#endif
    line_reader(const line_reader &) = delete;

    outcome read_line(const char *prompt, string &line) {
        had_text = false;
        at_prompt = true;
        const outcome got = history ? read_edited(prompt, line) : read_plain(prompt, line);
        at_prompt = false;
        if (got == INTERRUPT)
            pending.clear(), pasted.clear();
        return got;
    }

    // `pasted` continues `text`; its last line, if it has no end yet, is the user's to finish.
    outcome read_pasted(string &text) {
        while (!pasted.empty()) {
            const string all = text + pasted;
            string shown, line;
            for (size_t at = 0, end; (end = pasted.find('\n', at)) != string::npos; at = end + 1)
                shown += "... " + pasted.substr(at, end + 1 - at);
            const size_t last = all.rfind('\n');
            text = all.substr(0, last);
            pending.insert(0, all, last + 1, string::npos);
            pasted.clear();
            if (write_out(shown.data(), shown.size()))
                return END;
            if (last + 1 == all.size())
                return LINE;
            const outcome got = read_line("... ", line);
            if (got == INTERRUPT)
                return got;
            text += "\n" + line;
            ended = ended || got == END;
        }
        return LINE;
    }

    // A line; lines that were pasted; or all that stands between """ and """.
    outcome read_message(string &text, bool &block) {
        static const string quotes = "\"\"\"";
        block = false;
        string line;
        if (pending.empty()) {
            fill(0);
            typed_ahead = pending.find_first_of("\r\n") != string::npos;
        }
        if (const outcome got = read_line("> ", text))
            return got;
        if (!pasted.empty()) {
            block = true;
            return read_pasted(text);
        }
        const size_t start = std::min(text.find_first_not_of(" \t"), text.size());
        if (text.compare(start, 1, "/") == 0)
            return LINE;
        if (text.compare(start, 3, quotes) != 0) {
            outcome got = LINE;
            while (!typed_ahead && !marks_pastes && !pending.empty() && (got = read_line("... ", line)) == LINE)
                text += "\n" + line;
            ended = ended || got == END; // first the text, then the end
            return got == END ? LINE : got;
        }
        block = true;
        text.erase(0, start + 3);
        for (;;) {
            const size_t last = text.find_last_not_of(" \t\r");
            if (last != string::npos && last >= 2 && text.compare(last - 2, 3, quotes) == 0) {
                text.erase(last - 2);
                drop_newline(text);
                text.erase(0, !text.empty() && text[0] == '\n');
                return LINE;
            }
            if (const outcome got = read_line("... ", line))
                return got == END && !is_blank(text) ? LINE : got; // Ctrl-D ends the block
            text += "\n" + line;
        }
    }
};

// ---------------------------------------------------------------------------------------------------
// 11. CHAT
//
// The conversation on a terminal. Invariant: a message or an answer leaves the list only when the user is told.
// ---------------------------------------------------------------------------------------------------

struct chat {
    opened &m;
    conversation talk;
    session_file file;

    explicit chat(opened &model) : m(model), file(opt.session ? opt.session : "") {}

    // Against a full context. A first turn has none before it to drop.
    const char *advice() const {
        return talk.messages.size() > 2
                   ? "/compact drops the oldest turns, /clear begins anew, -c sets a larger context"
                   : "/clear begins anew, -c sets a larger context";
    }
    // The prompt for the last message. Where there is room for a few words only, it is refused.
    vector<int32_t> prompt() const {
        vector<int32_t> ids = talk.ids(m);
        const int ctx = engine_session_ctx(m.session), few = std::min(32, ctx / 8), most = opt.answer.max_tokens;
        if (ids.size() + size_t(most > 0 ? std::min(most, few) : few) > size_t(ctx))
            fail(EXIT_ERROR,
                 "not answered: with this message the prompt has %zu tokens, too many for an answer in the context of "
                 "%d; %s",
                 ids.size(), ctx, advice());
        return ids;
    }

    // Appends an answer. Returns false when there is none.
    bool answer_with(const vector<int32_t> &ids) {
        answer a(true);
        make_answer(m, ids, a);
        const bool some = a.code == 0 || !a.text.empty();
        if (some) // first of all: the terminal may be gone
            talk.messages.push_back({"assistant", without_nul(a.text)});
        a.leave_if_unwritten();
        if (!a.text.empty() || a.interrupted())
            print("\n");
        if (a.failed())
            fail(EXIT_ERROR, "%s", a.err.msg);
        if (some && a.interrupted())
            note("stopped; the partial answer stays in the conversation (/undo takes it back, /regen tries again)");
        if (a.context_full())
            note("stopped after %s: with the prompt of %zu the context of %d tokens is full; %s",
                 counted(a.result.n_tokens, "token").c_str(), ids.size(), engine_session_ctx(m.session), advice());
        print_statistics(m, a);
        if (some && m.stats().kv_bytes < SAVED_OFTEN)
            file.save(m, talk);
        return some;
    }
    enum { SAVED_OFTEN = 64 << 20 }; // bytes

    void send(const string &text) {
        talk.drop_unanswered();
        talk.messages.push_back({"user", without_nul(text)});
        vector<int32_t> ids;
        try {
            ids = prompt();
        } catch (const quit &) {
            talk.messages.pop_back();
            throw;
        }
        if (!answer_with(ids))
            note("no answer yet; /regen tries again");
    }

    // An answer goes only when there is another one.
    void regenerate() {
        chat_message old;
        const bool had = talk.take_answer(old);
        if (talk.messages.empty())
            fail(EXIT_ERROR, "there is nothing to answer yet");
        const auto keep = [&] {
            if (had)
                talk.messages.push_back(old);
        };
        bool done = false;
        try {
            const vector<int32_t> ids = prompt();
            m.set_seed(opt.answer.sampling.seed == UINT64_MAX - 1 ? 0 : opt.answer.sampling.seed + 1);
            done = answer_with(ids);
        } catch (const quit &) {
            if (talk.messages.back().role == "user")
                keep();
            throw;
        }
        if (!done)
            keep();
        if (!done)
            note(had ? "no new answer; the old one stays" : "no answer yet; /regen tries again");
    }

    // The beginning of a message, on one line.
    static string shown(const chat_message &c) {
        string text = c.content.substr(0, 60);
        for (char &ch : text)
            ch = (unsigned char)ch < 32 || ch == 127 ? ' ' : ch;
        while (!text.empty() && !is_utf8(text) && text.size() > 56)
            text.pop_back();
        return strf("%s: %s%s (%zu bytes)", c.role.c_str(), text.c_str(), text.size() < c.content.size() ? "..." : "",
                    c.content.size());
    }

    void undo() {
        chat_message answer;
        const bool had = talk.take_answer(answer);
        if (talk.messages.empty()) {
            if (had)
                talk.messages.push_back(answer);
            fail(EXIT_ERROR, "there is no message to take back");
        }
        tell("taken back: %s\n", shown(talk.messages.back()).c_str());
        talk.messages.pop_back();
        if (had)
            tell("taken back: %s\n", shown(answer).c_str());
    }

    // Drops whole turns: a message of the user with what follows it.
    void compact(const string &text) {
        vector<size_t> starts; // where each turn begins, and the end
        for (size_t i = 0; i < talk.messages.size(); i++)
            if (i == 0 || talk.messages[i].role == "user")
                starts.push_back(i);
        starts.push_back(talk.messages.size());
        const size_t turns = starts.size() - 1;
        const auto without = [&](size_t drop) {
            conversation c = talk;
            c.messages.erase(c.messages.begin(), c.messages.begin() + ptrdiff_t(starts[drop]));
            return c;
        };
        const auto tokens = [&](size_t drop) { return drop == turns ? 0 : without(drop).ids(m).size(); };
        const size_t ctx = size_t(engine_session_ctx(m.session));
        uint64_t drop = 0;
        if (!text.empty()) {
            if (!parse_whole(text.c_str(), 1, double(turns), drop))
                fail(EXIT_ERROR, "/compact: '%s' is not a number of turns; there are %zu", text.c_str(), turns);
        } else {
            size_t lo = 0, hi = turns; // more turns dropped leave fewer tokens
            while (lo < hi)
                tokens((lo + hi) / 2) * 2 <= ctx ? hi = (lo + hi) / 2 : lo = (lo + hi) / 2 + 1;
            drop = lo;
        }
        if (drop == 0) {
            tell("nothing dropped: the conversation takes %zu of %zu tokens\n", tokens(0), ctx);
            return;
        }
        conversation next = without(drop);
        const size_t left = tokens(drop);
        for (size_t i = 0; i < starts[drop]; i++)
            tell("dropped %s\n", shown(talk.messages[i]).c_str());
        talk = std::move(next);
        tell("dropped the oldest %llu of %s; %s left, %zu of %zu tokens\n", (unsigned long long)drop,
             counted(int64_t(turns), "turn").c_str(), talk.describe().c_str(), left, ctx);
    }

    static string value_of(const option_row &row) {
        const option_target &to = row.target;
        const char *const in_help = strrchr(row.help, '(') ? strrchr(row.help, '(') + 1 : ""; // the library's default
        string list;
        switch (to.kind) {
        case FLAG:
            return to.get<bool>() ? "on" : "off";
        case NUMBER:
        case COUNT:
            return std::to_string(to.get<int>() || row.lo <= 0 ? to.get<int>() : atoi(in_help));
        case REAL:
            return strf("%g", to.get<float>() != 0 || row.lo <= 0 ? double(to.get<float>()) : atof(in_help));
        case SEED:
            return std::to_string(to.get<uint64_t>());
        case TEXT:
        case CHOICE:
            return to.get<const char *>() ? to.get<const char *>() : "default";
        case TEXTS:
            for (const char *t : to.get<vector<const char *>>())
                list += (list.empty() ? "" : " ") + json_string(t);
            return !list.empty() ? list : *in_help ? "default: " + string(in_help, strcspn(in_help, ")")) : "none";
        case NUMBERS:
        case BIAS:
            for (const engine_logit_bias &b : to.get<vector<engine_logit_bias>>())
                list += strf("%s%d=%g", list.empty() ? "" : " ", b.id, double(b.bias));
            return list.empty() ? "none" : list;
        }
        return "";
    }

    // "KEY VALUE": as the option --KEY VALUE. A list gets one more item; "default" takes the setting back.
    void set(const string &text) {
        if (text.empty()) {
            for (const option_row &row : option_table)
                if (row.commands & SETTABLE)
                    tell("  %-18s %s\n", row.name, value_of(row).c_str());
            return;
        }
        const size_t space = std::min(text.find_first_of(" \t"), text.size());
        const string key = text.substr(0, space);
        const string value = space < text.size() ? text.substr(text.find_first_not_of(" \t", space)) : "";
        vector<string> names;
        for (const option_row &row : option_table)
            if (row.commands & SETTABLE)
                names.push_back(row.name);
        const option_row *row = settable(key);
        if (!row)
            fail(EXIT_ERROR, "no setting '%s'.%s /set lists them", key.c_str(), did_you_mean(key, names).c_str());
        if (value.empty())
            return tell("  %-18s %s\n", row->name, value_of(*row).c_str());
        const bool flag = row->target.kind == FLAG, is_list = row->target.kind == TEXTS || row->target.kind == BIAS;
        const bool back = value == "default" || (flag && value == "off");
        string range = "on or off";
        if (!back && !(flag ? value == "on" : store_option(*row, value.c_str(), range))) {
            m.apply_settings(); // what the check has left behind goes
            fail(EXIT_ERROR, "/set %s: '%s' is not %s", row->name, value.c_str(), range.c_str());
        }
        std::list<setting> next = opt.given;
        if (back || !is_list)
            next.remove_if([row](const setting &s) { return s.row == row; });
        if (!back)
            next.push_back({row, value});
        m.replace_settings(std::move(next));
        m.draw_seed();
        if (strcmp(row->name, "think") == 0 && opt.answer.think)
            m.check_template_knows("think", "enable_thinking");
        note("%s is %s", row->name, value_of(*row).c_str());
    }

    bool is_own_file(const string &path) const {
        return !file.path.empty() && session_file(path).is(state_of(file.path));
    }

    void load(const string &path) {
        const string before = talk.describe();
        const session_file read(path);
        if (!talk.load(m, path.c_str(), false))
            fail(EXIT_ERROR, "%s holds no conversation, only tokens", path.c_str());
        m.draw_seed();
        note("%s: %s, %s; this conversation had %s", path.c_str(), talk.describe().c_str(),
             counted(m.stats().n_tokens, "token").c_str(), before.c_str());
        if (file.path.empty() || is_own_file(path)) {
            file = read;
            file.written = m.session_note();
            note("what comes now is written to this file");
        } else {
            say_where_it_goes();
        }
    }
    void say_where_it_goes() const {
        if (!file.path.empty())
            note("%s gets this conversation in place of the one that is there, with the next answer or at the end",
                 file.path.c_str());
    }

    void show_stats() {
        const engine_session_stats s = m.stats();
        tell("%lld of %d tokens, %.2f MiB of KV cache, %s, seed %llu\n", (long long)s.n_tokens,
             engine_session_ctx(m.session), double(s.kv_bytes) / (1 << 20), talk.describe().c_str(),
             (unsigned long long)opt.answer.sampling.seed);
        tell("%lld tokens evaluated so far; of the last prompt's %lld, %lld were reused\n", (long long)s.evaluated,
             (long long)s.prompt_tokens, (long long)s.reused_tokens);
    }

    static void show_help() {
        string text;
        for (const chat_command_row &c : chat_commands)
            if (c.help)
                text += strf("  %-18s %s\n", (string(c.name) + (c.argument ? string(" ") + c.argument : "")).c_str(),
                             c.help);
        tell("%s"
             "  \"\"\"                begins and ends a message of several lines (those of a paste are one anyway)\n"
             "  Ctrl-C stops an answer; once more, or twice at the prompt, leaves\n",
             text.c_str());
    }

    void set_system(const string &text) {
        if (text.empty())
            return tell("%s\n", talk.has_system ? talk.system.c_str() : "(no system message)");
        if (m.plain)
            fail(EXIT_ERROR, "this model has no chat template, so a system message cannot be used with it");
        talk.has_system = text != "-";
        talk.system = talk.has_system ? text : "";
        note(talk.has_system ? "system message set" : "system message removed");
    }

    // A line that begins with '/'.
    void obey(const string &line) {
        const size_t space = line.find_first_of(" \t");
        const string word = line.substr(0, space);
        const size_t rest = space == string::npos ? space : line.find_first_not_of(" \t", space);
        const string text = rest == string::npos ? "" : line.substr(rest);
        vector<string> names;
        const chat_command_row *found = nullptr;
        for (const chat_command_row &c : chat_commands) {
            names.push_back(c.name);
            found = word == c.name ? &c : found;
        }
        if (!found)
            fail(EXIT_ERROR, "no command %s.%s /help lists them; a message that begins with / goes between \"\"\"",
                 word.c_str(), did_you_mean(word, names).c_str());
        if (!text.empty() && !found->argument)
            fail(EXIT_ERROR, "%s takes no argument", word.c_str());
        if (text.empty() && found->needs_argument())
            fail(EXIT_ERROR, "%s needs an argument: %s", word.c_str(), found->argument);
        const string path = user_path(text);
        switch (found->command) {
        case CLEAR:
            m.check(engine_rewind(m.session, 0, &m.err));
            talk.messages.clear();
            note("conversation cleared");
            return say_where_it_goes();
        case REGEN:
            return regenerate();
        case UNDO:
            return undo();
        case COMPACT:
            return compact(text);
        case SYSTEM:
            return set_system(text);
        case SET:
            return set(text);
        case THINK:
            return set("think" + (text.empty() ? "" : " " + text));
        case SAVE:
            talk.save(m, path);
            if (is_own_file(path))
                file.note_state(talk.note_bytes());
            return note("saved to %s", path.c_str());
        case LOAD:
            return load(path);
        case EXPORT:
            check_replaceable(path, "exported conversation", {"[\n{\"role\":\"", "[]\n"});
            if (const int problem = write_file(path, talk.json()))
                fail(EXIT_ERROR, "%s: %s", path.c_str(), strerror(problem));
            return note("%s written to %s", talk.describe().c_str(), path.c_str());
        case READ:
            return send_file(path);
        case STATS:
            return show_stats();
        case HELP:
            return show_help();
        case LEAVE:
            throw quit{EXIT_OK};
        }
    }

    void send_file(const string &path) {
        string text = read_text(path);
        drop_newline(text);
        if (is_blank(text))
            fail(EXIT_ERROR, "%s has no text", path.c_str());
        send(text);
    }

    void take(const string &text, bool block) {
        if (is_blank(text))
            return;
        const size_t start = text.find_first_not_of(" \t");
        if (!block && text[start] == '/')
            return obey(text.substr(start, text.find_last_not_of(" \t\r") + 1 - start));
        send(text);
    }
};

// Talks until the user leaves.
void converse(chat &c, line_reader &reader) {
    string text;
    for (int strikes = 0;;) { // strikes: Ctrl-C since something was entered
        bool block;
        const line_reader::outcome got = reader.read_message(text, block);
        if (got != line_reader::LINE)
            print("\n");
        if (got == line_reader::END)
            return;
        if (got == line_reader::LINE || reader.had_text || block)
            strikes = 0;
        try {
            if (got == line_reader::LINE)
                c.take(text, block);
        } catch (const quit &q) { // an error or a stop ends the turn, not the conversation
            if (q.code != EXIT_ERROR && !(caught && q.code == 128 + caught))
                throw;
        }
        const int signal = caught.exchange(0);
        if (signal == SIGTERM || signal == SIGHUP || (signal && ++strikes == 2))
            throw quit{128 + signal};
        if (signal && got == line_reader::INTERRUPT)
            note("Ctrl-C again, or Ctrl-D, leaves");
    }
}

void greet(opened &m) {
    note("%s, context of %d tokens (%s); /help lists the commands, Ctrl-D leaves", m.info.name,
         engine_session_ctx(m.session), m.context_reason(opt.ctx).c_str());
    if (m.plain)
        note("this model has no chat template: it completes text, each message on a new line after what stands before");
    const engine_sampling &s = opt.answer.sampling;
    if (m.from_model)
        note("sampling as the model's file asks where nothing else is given: temp %g, top-k %d, top-p %g, min-p %g",
             double(s.temperature), s.top_k, double(s.top_p), double(s.min_p));
}

void cmd_chat() {
    if (!isatty(0))
        return answer_once("no prompt: standard input has no text, and is no terminal to chat on");
    if (!isatty(1))
        fail(EXIT_USAGE, "chat needs a terminal for its output too; engine run answers one prompt");
    opened m;
    m.read_template();
    const bool old = session_exists();
    m.apply_settings();
    m.start(opt.ctx);
    chat c(m);
    if (old && c.talk.load(m, opt.session, true)) {
        c.file.written = m.session_note();
        note("%s: %s, %s", opt.session, c.talk.describe().c_str(), counted(m.stats().n_tokens, "token").c_str());
    } else if (old)
        note("%s holds no conversation; its tokens are reused", opt.session);
    m.draw_seed();
    if (opt.system)
        c.talk.has_system = true, c.talk.system = opt.system;
    if (m.plain && c.talk.has_system)
        fail(EXIT_ERROR, "%s has no chat template, so a system message cannot be used with it", opt.model);
    if (pipe(wake_pipe) < 0)
        fail(EXIT_ERROR, "pipe: %s", strerror(errno));
    for (int fd : wake_pipe)
        fcntl(fd, F_SETFL, O_NONBLOCK);
    catch_signal(SIGCONT);
    greet(m);
    line_reader reader;
    quit left = {EXIT_OK};
    for (bool again = true, first = true; again;
         first = false) { // whatever the reason to leave, the session is written
        try {
            again = false;
            converse(c, reader);
        } catch (const quit &q) {
            left = q;
        }
        caught = 0;
        try {
            c.file.save(m, c.talk);
        } catch (const quit &) {
            again = first && (left.code == EXIT_OK || left.code == 128 + SIGINT);
            left.code = again ? EXIT_OK : EXIT_ERROR;
            if (again)
                tell("engine: the conversation is not saved: /save it to another file, or leave again and lose it\n");
        }
    }
    if (left.code || c.file.moved)
        throw quit{left.code ? left.code : EXIT_ERROR};
}

// ---------------------------------------------------------------------------------------------------
// 12. MACHINE
//
// What the memory and the processor can do at most, measured: the ends that decode and prefill cannot pass.
// ---------------------------------------------------------------------------------------------------

// Runs work(t) on `threads` threads at once. Returns the seconds that took, 0 when there are not that many threads.
template <class F> double on_threads(size_t threads, F work) {
    vector<std::thread> pool;
    const double start = now_seconds();
    try {
        for (size_t t = 0; t < threads; t++)
            pool.emplace_back(work, t);
    } catch (const std::exception &) { // no more threads: no figure
    }
    for (std::thread &t : pool)
        t.join();
    return pool.size() == threads ? now_seconds() - start : 0;
}

// The bytes per second that `threads` threads read from memory together: the best of several passes over a buffer
// that no cache holds. 0 when there is no memory for it.
double measure_bandwidth(int threads) {
    const double memory = double(sysconf(_SC_PAGESIZE)) * double(sysconf(_SC_PHYS_PAGES));
    double bytes = 512.0 * (1 << 20);
#ifdef _SC_LEVEL3_CACHE_SIZE
    bytes = std::max(bytes, 4.0 * double(sysconf(_SC_LEVEL3_CACHE_SIZE)));
#endif
    const size_t lanes = 16, n = size_t(threads);
    const size_t share = size_t(std::min(bytes, memory / 8)) / sizeof(uint64_t) / n / lanes * lanes;
    const std::unique_ptr<uint64_t[]> data(new (std::nothrow) uint64_t[share * n]);
    if (!data || !share)
        return 0;
    double best = 0;
    std::atomic<uint64_t> total{0};
    for (int pass = 0; pass < 4; pass++) { // pass 0 writes
        const double seconds = on_threads(n, [&](size_t t) {
            uint64_t *mine = &data[share * t], sums[lanes] = {};
            if (pass == 0)
                std::fill(mine, mine + share, t + 1);
            else
                for (size_t i = 0; i < share; i += lanes)
                    for (size_t k = 0; k < lanes; k++)
                        sums[k] += mine[i + k];
            for (uint64_t x : sums)
                total += x; // used, so that the loop stays
        });
        if (pass)
            best = std::max(best, per_second(double(share * n * sizeof(uint64_t)), seconds));
    }
    return total ? best : 0;
}

// Products of 8-bit integers added into 32 bits, as the engine's matrix products do them, on registers only.
// Each kernel has enough independent sums to hide the latency of one; it returns a value, so that the loop stays.
struct int8_kernel {
    const char *name;
    int64_t macs; // of one round
    int64_t (*run)(int64_t rounds, int seed);
};

int64_t int8_plain(int64_t rounds, int seed) {
    int8_t a[256], b[256];
    for (int i = 0; i < 256; i++)
        a[i] = int8_t(i + seed), b[i] = int8_t(i ^ seed);
    int64_t total = 0;
    for (int64_t r = 0; r < rounds; r++) {
        int32_t sum = 0;
        for (int i = 0; i < 256; i++)
            sum += a[i] * b[i];
        a[r & 255] = int8_t(sum); // or else all rounds are one
        total += sum;
    }
    return total;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) int64_t int8_avx2(int64_t rounds, int seed) {
    enum { SUMS = 6 };
    __m256i sums[SUMS], b[SUMS], a = _mm256_set1_epi8(char(seed & 15));
    const __m256i ones = _mm256_set1_epi16(1);
    for (int k = 0; k < SUMS; k++)
        sums[k] = _mm256_setzero_si256(), b[k] = _mm256_set1_epi8(char(k + 1));
    for (int64_t r = 0; r < rounds; r++) {
        asm volatile("" : "+x"(a)); // may have changed: no product can be kept from the round before
#pragma GCC unroll 6
        for (int k = 0; k < SUMS; k++)
            sums[k] = _mm256_add_epi32(sums[k], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b[k]), ones));
    }
    for (int k = 1; k < SUMS; k++)
        sums[0] = _mm256_add_epi32(sums[0], sums[k]);
    return _mm256_extract_epi32(sums[0], 0);
}

__attribute__((target("avx512f,avx512vnni"))) int64_t int8_avx512(int64_t rounds, int seed) {
    enum { SUMS = 12 };
    __m512i sums[SUMS], a = _mm512_set1_epi32(seed & 0x0f0f0f0f), b = _mm512_set1_epi32(0x01020304);
    for (__m512i &x : sums)
        x = _mm512_setzero_si512();
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int k = 0; k < SUMS; k++)
            sums[k] = _mm512_dpbusd_epi32(sums[k], a, b);
    }
    for (int k = 1; k < SUMS; k++)
        sums[0] = _mm512_add_epi32(sums[0], sums[k]);
    return _mm512_cvtsi512_si32(sums[0]);
}
#endif

int8_kernel best_int8_kernel() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512f"))
        return {"AVX-512 VNNI", 12 * 64, int8_avx512};
    if (__builtin_cpu_supports("avx2"))
        return {"AVX2", 6 * 32, int8_avx2};
#endif
    return {"plain C++", 256, int8_plain};
}

// Multiply-adds of 8-bit integers per second that `threads` threads do together: the best of several tries.
double measure_int8(int threads) {
    const int8_kernel kernel = best_int8_kernel();
    std::atomic<int64_t> sink{0};
    double best = 0;
    int64_t rounds = 1000;
    for (int tries = 0; tries < 25;) { // short ones: on a busy machine some of them run undisturbed
        const double seconds = on_threads(size_t(threads), [&](size_t t) { sink += kernel.run(rounds, int(t) + 3); });
        if (seconds == 0)
            return 0;
        if (seconds < 0.005) { // starting threads would count
            rounds *= 2;
            continue;
        }
        tries++;
        best = std::max(best, per_second(double(kernel.macs) * double(rounds) * threads, seconds));
    }
    return best;
}

// ---------------------------------------------------------------------------------------------------
// 13. COMMANDS
//
// tokenize, info, perplexity, bench and plan: each prints one result on stdout, for people or with --json.
// ---------------------------------------------------------------------------------------------------

// Numbers with blanks or commas between them, also as a JSON list.
vector<int32_t> parse_ids(const opened &m, const string &text) {
    const char *between = " \t\r\n\v\f,[]";
    vector<int32_t> ids;
    for (size_t at = 0; (at = text.find_first_not_of(between, at)) != string::npos;) {
        const size_t end = std::min(text.find_first_of(between, at), text.size());
        const string word = text.substr(at, end - at);
        uint64_t id;
        if (word.find('\0') != string::npos || !parse_whole(word.c_str(), 0, m.info.n_vocab - 1, id))
            fail(EXIT_ERROR, "'%.40s' is not a token number from 0 to %d", word.c_str(), m.info.n_vocab - 1);
        ids.push_back(int32_t(id));
        at = end;
    }
    return ids;
}

string piece_json(const string &piece) {
    if (is_utf8(piece))
        return json_string(piece);
    return json_list(piece.data(), piece.size(), [](char c) { return std::to_string((unsigned char)c); });
}

void cmd_tokenize() {
    if (opt.decode && opt.no_bos)
        fail(EXIT_USAGE, "--no-bos has no meaning with --decode");
    if (opt.prompt && opt.file)
        fail(EXIT_USAGE, "-p/--prompt and -f/--file are two texts: give one");
    opened m;
    const string text = opt.prompt ? opt.prompt : read_input(opt.file ? opt.file : "-");
    if (opt.decode) {
        const vector<int32_t> ids = parse_ids(m, text);
        const string out = m.detokenize(ids, opt.special);
        if (opt.json)
            print("{\"ids\":" + json_ids(ids) + ",\"text\":" + json_string(out) + "}\n");
        else
            print(isatty(1) ? out + "\n" : out); // exact in a pipe: the text that was tokenized comes back
        return;
    }
    const vector<int32_t> ids =
        m.tokenize(text, (opt.no_bos ? 0 : ENGINE_ADD_BOS) | (opt.special ? ENGINE_PARSE_SPECIAL : 0));
    string line;
    for (int32_t id : ids)
        line += (line.empty() ? "" : " ") + std::to_string(id);
    if (opt.json)
        line = "{\"ids\":" + json_ids(ids) + ",\"pieces\":" +
               json_list(ids.data(), ids.size(), [&m](int32_t id) { return piece_json(m.piece(id)); }) + "}";
    print(line + "\n");
}

string facts_json(const vector<fact> &facts) {
    string json;
    for (const fact &f : facts)
        json += strf("%s\"%s\":%s", json.empty() ? "" : ",", f.key, f.value.c_str());
    return json;
}
string facts_text(const vector<fact> &facts) {
    string text;
    for (const fact &f : facts)
        if (f.label)
            text += strf("%-16s %s\n", f.label, f.text.c_str());
    return text;
}

// One line per key is "key = value", but a value may have lines of its own, and a key may contain " = ". So what could
// be a key is asked for, and is one when its value stands there; then the whole value is passed over.
string meta_json(opened &m) {
    const string all = m.meta(nullptr);
    std::set<string> seen;
    string out = "{";
    for (size_t at = 0; at < all.size();) {
        size_t end = all.find('\n', at);
        end = std::min(end, all.size());
        size_t next = end + 1;
        for (size_t equals = at; (equals = all.find(" = ", equals)) < end; equals++) {
            const string key = all.substr(at, equals - at);
            if (seen.count(key) || engine_meta(m.model, key.c_str(), nullptr, 0, nullptr) < 0)
                continue;
            const string value = m.meta(key.c_str());
            const size_t after = equals + 3 + value.size();
            if (all.compare(equals + 3, value.size(), value) != 0 || (after < all.size() && all[after] != '\n'))
                continue;
            out += (seen.empty() ? "" : ",") + json_string(key) + ":" + json_string(value);
            seen.insert(key);
            next = after + 1;
            break;
        }
        at = next;
    }
    return out + "}";
}

void cmd_info() {
    opened m;
    const vector<fact> facts = facts_of(m.info);
    if (opt.json)
        print("{" + facts_json(facts) + (opt.meta ? ",\"meta\":" + meta_json(m) : "") + "}\n");
    else
        print(facts_text(facts) + (opt.meta ? "\n" + m.meta(nullptr) + "\n" : ""));
}

// Sums -log p(next token) over the positions of a window.
struct scorer {
    const vector<int32_t> *window;
    size_t n_vocab, scored;
    double sum;

    static int row(void *user, size_t i, const float *logits) {
        scorer &s = *static_cast<scorer *>(user);
        if (i + 1 == s.window->size())
            return 0;
        const double best = double(*std::max_element(logits, logits + s.n_vocab));
        double total = 0;
        for (size_t k = 0; k < s.n_vocab; k++)
            total += exp(double(logits[k]) - best);
        s.sum += best + log(total) - double(logits[(*s.window)[i + 1]]);
        s.scored++;
        return 0;
    }
};

void cmd_perplexity() {
    if (!opt.file && isatty(0))
        fail(EXIT_USAGE, "no text: give -f FILE, or the text on standard input");
    opened m;
    const vector<int32_t> ids = m.tokenize(read_input(opt.file ? opt.file : "-"), 0);
    const size_t bos = m.info.add_bos && m.info.bos >= 0;
    const size_t size = opt.ctx ? size_t(opt.ctx) : 512, step = size - bos;
    if (ids.size() + bos < 2)
        fail(EXIT_ERROR, "the text has %s: there is nothing to score", counted(int64_t(ids.size()), "token").c_str());
    m.start(int(size));
    const size_t windows = (ids.size() + step - 1) / step;
    const progress bar{"perplexity"};
    scorer s = {nullptr, size_t(m.info.n_vocab), 0, 0};
    for (size_t w = 0; w < windows; w++) {
        vector<int32_t> window(bos, m.info.bos);
        for (size_t i = w * step; i < std::min(ids.size(), (w + 1) * step); i++)
            window.push_back(ids[i]);
        s.window = &window;
        m.check(engine_sync(m.session, nullptr, 0, &m.err));
        m.check(engine_eval_all(m.session, window.data(), window.size(), scorer::row, &s, &m.err));
        leave_if_caught();
        if (bar_wanted())
            bar.at(int64_t(w + 1), int64_t(windows));
    }
    const double nll = s.sum / double(s.scored);
    if (opt.json)
        print(strf("{\"tokens\":%zu,\"window\":%zu,\"windows\":%zu,\"scored\":%zu,\"mean_nll\":%s,\"perplexity\":%s}\n",
                   ids.size(), size, windows, s.scored, json_number(nll).c_str(), json_number(exp(nll)).c_str()));
    else
        print(strf("tokens scored  %zu of %zu, in %zu windows of %zu\nmean NLL       %.6f nats\nperplexity     %.4f\n",
                   s.scored, ids.size(), windows, size, nll, exp(nll)));
}

double median(const vector<double> &sorted) {
    return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
}

struct bench_row {
    bool decode;
    int depth, tokens;
    double rate, least, most; // tokens per second: the median, and the ends
    double bytes;             // that one decode step reads; NAN for prefill, which computes more than it reads
    double itl_p50, itl_p99;  // seconds of one decode step; NAN for prefill
    const char *name() const { return decode ? "decode" : "prefill"; }
    double speed() const { return bytes * rate; } // bytes per second
    double seconds() const { return tokens / rate; }
};

// Repetitions of `tokens` ids after `depth` ones, all at once or one by one.
bench_row bench(opened &m, const vector<int32_t> &ids, int depth, bool decode) {
    const int tokens = decode ? opt.decode_tokens : opt.prefill_tokens, batch = decode ? 1 : tokens;
    vector<double> rates, steps;
    double bytes = NAN;
    for (int r = -1; r < opt.repeat; r++) { // -1: warms caches and threads, with less
        const int n = r < 0 ? std::min(tokens, decode ? 4 : 32) : tokens;
        const float *logits;
        m.check(engine_sync(m.session, ids.data(), size_t(depth), &m.err)); // the same start every time, from the cache
        const engine_session_stats before = m.stats();
        const double start = now_seconds();
        for (int i = 0; i < n; i += batch) {
            const double step = now_seconds();
            m.check(engine_eval(m.session, ids.data() + depth + i, size_t(std::min(batch, n)), &m.err));
            m.check(engine_logits(m.session, &logits, &m.err));
            leave_if_caught();
            if (r >= 0)
                steps.push_back(now_seconds() - step);
        }
        const double seconds = now_seconds() - start;
        const engine_session_stats after = m.stats();
        if (decode)
            bytes = per_second(double(after.decode_bytes - before.decode_bytes),
                               double(after.decode_tokens - before.decode_tokens));
        if (r >= 0)
            rates.push_back(per_second(n, seconds));
    }
    std::sort(rates.begin(), rates.end());
    std::sort(steps.begin(), steps.end());
    const double p99 = steps[size_t(double(steps.size() - 1) * 0.99)];
    return {decode,
            depth,
            tokens,
            median(rates),
            rates.front(),
            rates.back(),
            bytes,
            decode ? median(steps) : NAN,
            decode ? p99 : NAN};
}

string percent(double share) { return std::isfinite(share) ? strf("%.1f %%", 100 * share) : "an unknown share"; }

// What the rows of one depth say together.
struct verdict {
    int depth = 0;
    const bench_row *prefill = nullptr, *decode = nullptr;
    double bandwidth = 0, int8 = 0, token_macs = 0;

    double decode_share() const { return decode && bandwidth > 0 ? decode->speed() / bandwidth : NAN; }
    double prefill_share() const { return prefill && int8 > 0 ? prefill->rate * token_macs / int8 : NAN; }
    // "decode" or "prefill": where the time goes; null when only one was measured.
    const char *bound() const {
        return !prefill || !decode ? nullptr : prefill->seconds() > decode->seconds() ? "prefill" : "decode";
    }
    string reason() const {
        if (!bound())
            return "";
        return strf("%d prompt tokens take %.3g s, %d answer tokens %.3g s", prefill->tokens, prefill->seconds(),
                    decode->tokens, decode->seconds());
    }
    string json() const {
        const auto number = [](double x) { return json_number(x); };
        return strf("{\"depth\":%d", depth) + ",\"ttft_s\":" + number(prefill ? prefill->seconds() : NAN) +
               ",\"itl_p50_s\":" + number(decode ? decode->itl_p50 : NAN) +
               ",\"itl_p99_s\":" + number(decode ? decode->itl_p99 : NAN) +
               ",\"bandwidth_share\":" + number(decode_share()) + ",\"int8_share\":" + number(prefill_share()) +
               ",\"bound\":" + (bound() ? json_string(bound()) : "null") + ",\"reason\":" + json_string(reason()) + "}";
    }
    string text() const {
        string out = strf("\ndepth %d:", depth);
        if (prefill)
            out += strf(" TTFT %.4g s, prefill makes %s of the int8 peak%s", prefill->seconds(),
                        percent(prefill_share()).c_str(), decode ? "\n        " : "\n");
        if (decode)
            out += strf(" ITL p50 %.2f p99 %.2f ms, decode reads %s of the memory bandwidth\n", decode->itl_p50 * 1e3,
                        decode->itl_p99 * 1e3, percent(decode_share()).c_str());
        if (bound())
            out += strf("         %s-bound: %s\n", bound(), reason().c_str());
        return out;
    }
};

string bench_json(const engine_model_info &i, const vector<verdict> &verdicts, const vector<bench_row> &rows) {
    const auto row_json = [&](const bench_row &r) {
        string row = strf("{\"test\":\"%s\",\"depth\":%d,\"tokens\":%d", r.name(), r.depth, r.tokens);
        row += ",\"tok_s\":" + json_number(r.rate) + ",\"min_tok_s\":" + json_number(r.least);
        row += ",\"max_tok_s\":" + json_number(r.most) + ",\"bytes_per_token\":" + json_number(r.bytes);
        row += ",\"gb_s\":" + json_number(r.speed() * 1e-9);
        return row + ",\"bandwidth_share\":" + json_number(r.speed() / verdicts[0].bandwidth) + "}";
    };
    return "{\"model\":" + json_string(i.name) + ",\"arch\":" + json_string(i.arch) +
           ",\"types\":" + json_string(i.types) + ",\"backend\":" + json_string(i.backend) +
           strf(",\"threads\":%d", i.threads) + ",\"generic_ops\":" + json_string(i.generic_ops) +
           ",\"bandwidth_gb_s\":" + json_number(verdicts[0].bandwidth * 1e-9) +
           ",\"int8_macs_s\":" + json_number(verdicts[0].int8) +
           ",\"rows\":" + json_list(rows.data(), rows.size(), row_json) +
           ",\"verdicts\":" + json_list(verdicts.data(), verdicts.size(), [](const verdict &v) { return v.json(); }) +
           "}\n";
}

string bench_text(const engine_model_info &i, const vector<verdict> &verdicts, const vector<bench_row> &rows) {
    const double bandwidth = verdicts[0].bandwidth;
    string out = strf("%s (%s, %s parameters, %s)\n%s, %d threads, memory bandwidth %.2f GB/s, generic path: %s\n",
                      i.name, i.arch, scaled(double(i.n_params), "").c_str(), i.types, i.backend, i.threads,
                      bandwidth * 1e-9, *i.generic_ops ? i.generic_ops : "none");
    out += strf("int8 peak %s multiply-adds per second (%s)\n\n", scaled(verdicts[0].int8, "").c_str(),
                best_int8_kernel().name);
    out += "test       depth  tokens       tok/s   slowest   fastest";
    out += opt.decode_tokens ? "  MB/token     GB/s  of bandwidth\n" : "\n";
    bool cached = false;
    for (const bench_row &r : rows) {
        out += strf("%-8s %7d %7d %11.2f %9.2f %9.2f", r.name(), r.depth, r.tokens, r.rate, r.least, r.most);
        if (r.decode)
            out += strf(" %9.2f %8.2f", r.bytes * 1e-6, r.speed() * 1e-9);
        if (r.decode && bandwidth > 0)
            out += strf(" %13.2f", r.speed() / bandwidth);
        out += "\n";
        cached = cached || (bandwidth > 0 && r.speed() > bandwidth);
    }
    for (const verdict &v : verdicts)
        out += v.text();
    return out + (cached ? "\nMore than the memory's bandwidth: this model fits into the processor's cache.\n" : "");
}

engine_plan_info plan(int ctx) {
    engine_plan_info p = {};
    p.size = sizeof p;
    engine_error err = {};
    const engine_open_options open_opt = open_options();
    const engine_session_options session_opt = session_options(ctx);
    if (engine_plan(opt.model, &open_opt, &session_opt, &p, &err) < 0)
        fail(EXIT_ERROR, "%s", err.msg);
    return p;
}

void cmd_bench() {
    if (!opt.prefill_tokens && !opt.decode_tokens)
        fail(EXIT_USAGE, "-p 0 and -n 0 leave nothing to measure");
    const vector<int> depths = opt.depths.empty() ? vector<int>{0} : opt.depths;
    const int64_t most =
        int64_t(*std::max_element(depths.begin(), depths.end())) + std::max(opt.prefill_tokens, opt.decode_tokens);
    if (most > INT_MAX)
        fail(EXIT_USAGE, "-p, -n and --depth add up to %lld tokens", (long long)most);
    opened m;
    const double bandwidth = measure_bandwidth(m.info.threads); // before the cache takes memory
    const double int8 = measure_int8(m.info.threads), macs = double(plan(int(most)).token_macs);
    m.start(int(most));
    std::mt19937 random(1);
    vector<int32_t> ids(static_cast<size_t>(most));
    for (int32_t &id : ids)
        id = int32_t(random() % uint32_t(m.info.n_vocab));
    vector<bench_row> rows;
    rows.reserve(2 * depths.size()); // the verdicts point into it
    vector<verdict> verdicts;
    progress bar{"bench"};
    for (size_t d = 0; d < depths.size(); d++) {
        verdict v;
        v.depth = depths[d], v.bandwidth = bandwidth, v.int8 = int8, v.token_macs = macs;
        for (const bool decode : {false, true}) {
            if (bar_wanted())
                bar.at(int64_t(2 * d + decode), int64_t(2 * depths.size()));
            if (!(decode ? opt.decode_tokens : opt.prefill_tokens))
                continue;
            rows.push_back(bench(m, ids, depths[d], decode));
            (decode ? v.decode : v.prefill) = &rows.back();
        }
        verdicts.push_back(v);
    }
    print((opt.json ? bench_json : bench_text)(m.info, verdicts, rows));
}

// What one context size needs, and the most tokens per second that the bandwidth allows when it is full.
struct plan_row {
    engine_plan_info p;
    double bandwidth;
    int64_t memory() const {
        return p.widened_bytes + p.cache_bytes + p.work_bytes + p.scratch_bytes + p.session_bytes;
    }
    bool fits() const { return p.weight_bytes + memory() <= p.memory_bytes; }
    double decode_rate() const { return bandwidth / double(p.decode_bytes + p.decode_kv_bytes); }
};

vector<fact> plan_facts(const plan_row &r) {
    const engine_plan_info &p = r.p;
    const auto bytes = [](int64_t x) { return scaled(double(x), "B"); };
    const auto num = [](int64_t x) { return std::to_string(x); };
    return {
        {"n_ctx", num(p.n_ctx), "context", num(p.n_ctx) + " tokens"},
        {"kv", json_string(p.kv), "cache rows", p.kv},
        {"chunk", num(p.chunk), "chunk", num(p.chunk) + " prompt tokens at a time"},
        {"backend", json_string(p.backend), "runs on", p.backend + strf(", %d threads", p.threads)},
        {"threads", num(p.threads), nullptr, ""},
        {"weight_bytes", num(p.weight_bytes), "weights", bytes(p.weight_bytes) + ", mapped from the file"},
        {"widened_bytes", num(p.widened_bytes), "widened tensors", bytes(p.widened_bytes)},
        {"cache_bytes", num(p.cache_bytes), "cache",
         bytes(p.cache_bytes) + ": " + bytes(p.kv_token_bytes) + " per token, pages of " + bytes(p.page_bytes)},
        {"kv_token_bytes", num(p.kv_token_bytes), nullptr, ""},
        {"page_bytes", num(p.page_bytes), nullptr, ""},
        {"checkpoint_bytes", num(p.checkpoint_bytes), p.checkpoint_bytes ? "checkpoints" : nullptr,
         bytes(p.checkpoint_bytes) + " of the cache"},
        {"work_bytes", num(p.work_bytes), "work space", bytes(p.work_bytes)},
        {"scratch_bytes", num(p.scratch_bytes), "scratch", bytes(p.scratch_bytes)},
        {"session_bytes", num(p.session_bytes), "session", bytes(p.session_bytes)},
        {"needed_bytes", num(p.weight_bytes + r.memory()), "all together",
         bytes(p.weight_bytes + r.memory()) + " of " + bytes(p.memory_bytes) + (r.fits() ? "" : ": does not fit")},
        {"memory_bytes", num(p.memory_bytes), nullptr, ""},
        {"fits", r.fits() ? "true" : "false", nullptr, ""},
        {"max_ctx", num(p.max_ctx), "largest context", num(p.max_ctx) + " tokens would fit"},
        {"decode_bytes", num(p.decode_bytes), "one token reads",
         bytes(p.decode_bytes) + " of weights, " + bytes(p.decode_kv_bytes) + " of cache when the context is full"},
        {"decode_kv_bytes", num(p.decode_kv_bytes), nullptr, ""},
        {"token_macs", num(p.token_macs), "one token takes", scaled(double(p.token_macs), "") + " multiply-adds"},
    };
}

// The least time that a prompt and its answer take: prefill reads the weights once per chunk and multiplies for every
// token, decode reads weights and cache for every token.
struct forecast {
    double prefill_rate = 0, prefill = 0, decode = 0; // tokens per second; seconds
    bool by_memory = false;                           // prefill is: a short prompt

    forecast(double bandwidth, double int8) {
        const engine_plan_info p = plan(std::min<int>(opt.prefill_tokens + opt.decode_tokens / 2, 1 << 28));
        const double chunks = std::ceil(double(opt.prefill_tokens) / p.chunk);
        const double multiply = opt.prefill_tokens * double(p.token_macs) / int8;
        const double read = chunks * double(p.decode_bytes) / bandwidth;
        by_memory = read > multiply;
        prefill = std::max(read, multiply);
        prefill_rate = opt.prefill_tokens / prefill;
        decode = opt.decode_tokens *
                 std::max(double(p.decode_bytes + p.decode_kv_bytes) / bandwidth, double(p.token_macs) / int8);
    }
    const char *bottleneck() const { return prefill > decode ? "prefill" : "decode"; }
};

void cmd_plan() {
    if (int64_t(opt.prefill_tokens) + opt.decode_tokens > 1 << 28)
        fail(EXIT_USAGE, "-p and -n add up to more than %d tokens", 1 << 28);
    const engine_plan_info chosen = plan(opt.ctx);
    const int usual = opt.ctx ? plan(0).n_ctx : 0;
    if (opt.ctx > usual)
        note("a context of %d is more than the %d that the model was trained for, or that memory allows", opt.ctx,
             usual);
    const double bandwidth = measure_bandwidth(chosen.threads), int8 = measure_int8(chosen.threads);
    if (bandwidth <= 0 || int8 <= 0)
        fail(EXIT_ERROR, "this machine cannot be measured: no memory, or no threads");
    const plan_row row = {chosen, bandwidth};
    vector<plan_row> table;
    for (int64_t ctx = 2048; ctx < chosen.n_ctx; ctx *= 2)
        table.push_back({plan(int(ctx)), bandwidth});
    table.push_back(row);
    const forecast f(bandwidth, int8);
    if (opt.json) {
        const auto line = [](const plan_row &r) {
            return strf("{\"n_ctx\":%d,\"cache_bytes\":%lld,\"needed_bytes\":%lld,\"fits\":%s,\"decode_tok_s\":",
                        r.p.n_ctx, (long long)r.p.cache_bytes, (long long)(r.p.weight_bytes + r.memory()),
                        r.fits() ? "true" : "false") +
                   json_number(r.decode_rate()) + "}";
        };
        return print("{" + facts_json(plan_facts(row)) + ",\"bandwidth_gb_s\":" + json_number(bandwidth * 1e-9) +
                     ",\"int8_macs_s\":" + json_number(int8) +
                     ",\"contexts\":" + json_list(table.data(), table.size(), line) +
                     strf(",\"prompt_tokens\":%d,\"answer_tokens\":%d", opt.prefill_tokens, opt.decode_tokens) +
                     ",\"prefill_tok_s\":" + json_number(f.prefill_rate) + ",\"prefill_s\":" + json_number(f.prefill) +
                     ",\"decode_s\":" + json_number(f.decode) + ",\"bottleneck\":\"" + f.bottleneck() + "\"}\n");
    }
    string out = facts_text(plan_facts(row));
    out += "\n   context        cache     together   fits   decode at most\n";
    for (const plan_row &r : table)
        out +=
            strf("%10d %12s %12s   %-4s %9.1f tok/s\n", r.p.n_ctx, scaled(double(r.p.cache_bytes), "B").c_str(),
                 scaled(double(r.p.weight_bytes + r.memory()), "B").c_str(), r.fits() ? "yes" : "no", r.decode_rate());
    out += strf("\nThis machine reads %.2f GB/s and does %s int8 multiply-adds per second (%s).\n", bandwidth * 1e-9,
                scaled(int8, "").c_str(), best_int8_kernel().name);
    out += strf("A prompt of %d tokens takes at least %.3g s (%.0f tok/s at most, by %s),\n", opt.prefill_tokens,
                f.prefill, f.prefill_rate, f.by_memory ? "bandwidth" : "arithmetic");
    out += strf("an answer of %d at least %.3g s: %s will be the bottleneck.\n", opt.decode_tokens, f.decode,
                f.bottleneck());
    print(out);
}

// ---------------------------------------------------------------------------------------------------
// 14. MAIN
//
// The table of commands; finds one and runs it.
// ---------------------------------------------------------------------------------------------------

const command command_table[] = {
    {"run", RUN, cmd_run, "answer one prompt",
     "The prompt is -p TEXT, then the file of -f, then stdin unless that is a terminal, with a blank line\n"
     "between them. One trailing newline of a file and of stdin is dropped. Stdin is read to its end; where\n"
     "it is open but silent, use < /dev/null. The prompt goes through the model's chat template (a NUL in it\n"
     "becomes U+FFFD); a model without one, or --raw, gets the text itself. The answer and a newline go to\n"
     "stdout, statistics to stderr.\n"
     "With --session FILE the conversation goes on where the file ends; engine chat reads the same files.\n",
     0},
    {"chat", CHAT, cmd_chat, "talk with the model on a terminal",
     "Ctrl-C stops an answer, a second one leaves (130); Ctrl-D leaves (0); /help lists the commands. When\n"
     "stdin is not a terminal it is answered as one prompt, as by run. The lines of earlier chats are kept in\n"
     "$XDG_STATE_HOME/engine/history or ~/.local/state/engine/history.\n",
     0},
    {"tokenize", TOKENIZE, cmd_tokenize, "turn text into token numbers, or back",
     "Reads stdin, or -p TEXT, or -f FILE, byte for byte, and prints the numbers on one line: what the model\n"
     "would be fed, so with the BOS that it wants. --json adds the pieces (one that is no valid UTF-8 as a\n"
     "list of bytes).\n",
     0},
    {"info", INFO, cmd_info, "print a model's facts", "", 0},
    {"perplexity", PERPLEXITY, cmd_perplexity, "measure how well the model predicts a text",
     "The text (-f FILE or stdin) is cut into windows of -c tokens, each evaluated from an empty context;\n"
     "where the model wants a BOS it starts each window. Every token but a window's first is scored, those\n"
     "of a short last window too. Prints the mean negative log-likelihood in nats and its exponential.\n",
     0},
    {"bench", BENCH, cmd_bench, "measure speed",
     "Prefill and decode with random tokens, beside the memory bandwidth that this machine reaches when it\n"
     "only reads and the int8 multiply-adds that it makes when it only multiplies, and the verdict: which of\n"
     "the two takes the time.\n",
     64},
    {"plan", PLAN, cmd_plan, "tell what a model will need and how fast it can be",
     "Without reading the weights: memory for a context, which contexts fit, and the highest speed that this\n"
     "machine's bandwidth and arithmetic (both are measured) allow for a prompt of -p and an answer of -n\n"
     "tokens. The real speed is lower: see engine bench.\n",
     256},
};

string program_help() {
    string text =
        "engine " ENGINE_VERSION ": run a language model on this machine\n\nengine COMMAND MODEL [options]\n\n";
    for (const command &c : command_table)
        text += strf("  %-12s %s\n", c.name, c.summary);
    return text + "  help COMMAND what a command does, and its options\n\n"
                  "  engine chat model.gguf\n"
                  "  engine run model.gguf -p \"Name three rivers.\"\n"
                  "  cat letter.txt | engine run model.gguf -p \"Summarise:\"\n\n"
                  "Exit codes: 0 ok, 1 error, 2 usage, 130 interrupted.\n";
}

void run_program(int argc, char **argv) {
    const auto is_help = [](const string &w) { return w == "help" || w == "--help" || w == "-h"; };
    string word = argc > 1 ? argv[1] : "";
    const bool help = is_help(word);
    if (help && argc > 2)
        word = argv[2];
    const command *cmd = nullptr;
    vector<string> names = {"help", "version"};
    for (const command &c : command_table) {
        names.push_back(c.name);
        cmd = word == c.name ? &c : cmd;
    }
    if (cmd && !help) {
        opt.decode_tokens = cmd->decode_tokens;
        parse_options(*cmd, argc - 2, argv + 2);
    }
    if (cmd && !help && !opt.help) {
        if (!opt.model)
            fail(EXIT_USAGE, "no model: engine %s MODEL; see 'engine help %s'", cmd->name, cmd->name);
        return cmd->run();
    }
    if (help && argc > 3)
        fail(EXIT_USAGE, "unexpected argument '%s'; see 'engine help'", argv[3]);
    if (cmd)
        return print(command_help(*cmd));
    if (is_help(word))
        return print(program_help());
    if (word == "version" || word == "--version" || word == "-V")
        return print("engine " + string(engine_version()) + "\n");
    if (word.empty()) {
        dprintf(2, "%s", program_help().c_str());
        throw quit{EXIT_USAGE};
    }
    fail(EXIT_USAGE, "no command '%s'.%s See 'engine --help'", word.c_str(), did_you_mean(word, names).c_str());
}

} // namespace

int main(int argc, char **argv) {
    hold_standard_descriptors();
    catch_signals();
    engine_set_log(on_log, nullptr);
    try {
        run_program(argc, argv);
        if (close(1) < 0 && errno != EBADF && errno != EINTR) // a full disk may show only now
            fail(EXIT_ERROR, "standard output: %s", strerror(errno));
    } catch (const quit &q) {
        if (bar_shown)
            dprintf(2, "\n"); // it shows how far the work was
        return q.code;
    } catch (const std::exception &e) { // no memory, no thread
        dprintf(2, "engine: %s\n", e.what());
        return EXIT_ERROR;
    }
    return EXIT_OK;
}
