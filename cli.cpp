// cli.cpp: the engine program. It knows engine.h and nothing else of ours.   MIT licence, see LICENSE.
//
// CONTENTS
//   1. SIGNALS    what Ctrl-C and a closed pipe do
//   2. OUTPUT     stdout for results, stderr for everything else
//   3. OPTIONS    the one table of options, its parser and its help
//   4. JSON       writing it
//   5. MODEL      opening, tokenizing
//   6. PROMPT     what the arguments and stdin make together
//   7. ANSWER     one prompt in, one streamed answer out, and its statistics
//   8. CHAT       the conversation on a terminal
//   9. COMMANDS   tokenize, info, perplexity, bench
//  10. MAIN
//
// Exit codes: 0 ok, 1 error, 2 usage, 130 interrupted (143 by SIGTERM). A closed pipe on stdout is a quiet 0.
// stdout carries what was asked for and nothing else; -q silences stderr but for errors. No colour is ever used.

#include "engine.h"

#include <fcntl.h>
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
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
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#ifdef HAVE_LIBEDIT
#include <histedit.h>
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
// SIGINT and SIGTERM stop a computing session through engine_cancel; a second one, or one that comes while
// nothing computes, ends the program at once. At the chat prompt they only wake the line reader, through a
// pipe, so that no wake-up is lost and no thread needs to be the right one. SIGPIPE is ignored: a closed
// pipe shows as EPIPE.
// ---------------------------------------------------------------------------------------------------

std::atomic<engine_session *> computing{nullptr}; // the session to cancel
std::atomic<int> caught{0};                       // the last signal since it was set to 0
std::atomic<bool> at_prompt{false}, resumed{false};
int wake_pipe[2] = {-1, -1};

void on_signal(int sig) {
    const int saved = errno;
    engine_session *session = computing;
    if (sig == SIGCONT)
        resumed = true;
    else if (at_prompt)
        caught = sig;
    else if (!session || caught.exchange(sig))
        _exit(128 + sig);
    else
        engine_cancel(session);
    if (at_prompt && write(wake_pipe[1], "", 1) < 0)
        errno = 0; // a full pipe wakes as well
    errno = saved;
}

void catch_signals() {
    struct sigaction act = {};
    act.sa_handler = on_signal; // no SA_RESTART: a blocked write must return
    sigaction(SIGINT, &act, nullptr);
    sigaction(SIGTERM, &act, nullptr);
    act.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &act, nullptr);
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

// What the command line asked for.
struct options {
    const char *model = nullptr, *prompt = nullptr, *file = nullptr, *system = nullptr;
    int max_tokens = 0, ctx = 0, threads = 0, chunk = 0, top_k = 40;
    double temp = 0.8, top_p = 0.95, min_p = 0.05;
    uint64_t seed = UINT64_MAX; // UINT64_MAX: a random one
    vector<const char *> stops;
    bool raw = false, ignore_eos = false, no_mmap = false, json = false, logits = false;
    bool decode = false, no_bos = false, special = false, meta = false;
    bool quiet = false, verbose = false, help = false;
    int bench_prefill = 512, bench_decode = 64, repeat = 3;
    vector<int> depths;
    vector<size_t> given; // rows of the option table
} opt;

enum { RUN = 1, CHAT = 2, TOKENIZE = 4, INFO = 8, PERPLEXITY = 16, BENCH = 32, ALL = 63, GENERATE = RUN | CHAT };
enum { COMPUTES = RUN | CHAT | PERPLEXITY | BENCH };
enum { SHAPES_ANSWER = 64, SAMPLE = SHAPES_ANSWER | int(GENERATE) };
enum option_kind { FLAG, NUMBER, REAL, TEXT, SEED, TEXTS, NUMBERS };

// Where a value goes; its type says how it is read.
struct option_target {
    option_kind kind;
    void *at;
    option_target(bool *p) : kind(FLAG), at(p) {}
    option_target(int *p) : kind(NUMBER), at(p) {}
    option_target(double *p) : kind(REAL), at(p) {}
    option_target(const char **p) : kind(TEXT), at(p) {}
    option_target(uint64_t *p) : kind(SEED), at(p) {}
    option_target(vector<const char *> *p) : kind(TEXTS), at(p) {}
    option_target(vector<int> *p) : kind(NUMBERS), at(p) {}
    template <class T> T &get() const { return *static_cast<T *>(at); }
};

struct option_row {
    char letter;              // 0: none
    const char *name, *value; // value: what the help calls it, null for a flag
    unsigned commands;
    option_target target;
    double lo, hi; // the range of a number
    const char *help;
};

const double INT_TOP = INT_MAX;

const option_row option_table[] = {
    {'m', "model", "FILE", ALL, &opt.model, 0, 0, "the model, a GGUF file (or simply the first argument)"},
    {'p', "prompt", "TEXT", RUN | TOKENIZE, &opt.prompt, 0, 0, "the text"},
    {'f', "file", "FILE", RUN | TOKENIZE | PERPLEXITY, &opt.file, 0, 0, "read the text from a file; - is stdin"},
    {'s', "system", "TEXT", GENERATE, &opt.system, 0, 0, "the system message"},
    {'n', "max-tokens", "N", SAMPLE, &opt.max_tokens, -1, INT_TOP,
     "stop after N tokens (0 or -1: at the end of turn or context)"},
    {'c', "ctx", "N", GENERATE, &opt.ctx, 0, INT_TOP, "context size in tokens (0: as the model was trained)"},
    {'c', "ctx", "N", PERPLEXITY, &opt.ctx, 2, INT_TOP, "tokens per window (512)"},
    {'t', "threads", "N", COMPUTES, &opt.threads, 0, 512, "threads (0: one per core)"},
    {0, "temp", "X", SAMPLE, &opt.temp, 0, 100, "temperature (0.8); 0 takes the likeliest token always"},
    {0, "top-k", "N", SAMPLE, &opt.top_k, 0, INT_TOP, "sample from the N likeliest tokens (40; 0: off)"},
    {0, "top-p", "X", SAMPLE, &opt.top_p, 1e-6, 1, "sample from the likeliest that make up X (0.95; 1: off)"},
    {0, "min-p", "X", SAMPLE, &opt.min_p, 0, 1, "leave out what has less than X of the best (0.05; 0: off)"},
    {0, "seed", "N", SAMPLE, &opt.seed, 0, 0, "seed of the draws (-1: a new one; it is shown)"},
    {0, "stop", "TEXT", SAMPLE, &opt.stops, 0, 0, "end the answer before this text; may be given several times"},
    {0, "ignore-eos", nullptr, SAMPLE, &opt.ignore_eos, 0, 0, "go on when the model ends its turn"},
    {0, "raw", nullptr, RUN, &opt.raw, 0, 0, "complete the text as it is; special tokens in it count"},
    {0, "logits", nullptr, RUN, &opt.logits, 0, 0, "no answer: print the logits after the prompt as JSON"},
    {0, "decode", nullptr, TOKENIZE, &opt.decode, 0, 0, "the other way: numbers in, text out"},
    {0, "special", nullptr, TOKENIZE, &opt.special, 0, 0, "read special tokens in the text; --decode: write them"},
    {0, "no-bos", nullptr, TOKENIZE, &opt.no_bos, 0, 0, "leave out the BOS (and EOS) that the model wants"},
    {0, "meta", nullptr, INFO, &opt.meta, 0, 0, "all metadata of the file"},
    {'p', "prefill", "N", BENCH, &opt.bench_prefill, 0, INT_TOP, "prompt tokens to evaluate (512; 0: skip)"},
    {'n', "decode", "N", BENCH, &opt.bench_decode, 0, INT_TOP, "single tokens to evaluate (64; 0: skip)"},
    {0, "depth", "LIST", BENCH, &opt.depths, 0, INT_TOP, "tokens already in the context (0), as 0,1024,4096"},
    {'r', "repeat", "N", BENCH, &opt.repeat, 1, 1000, "measurements, of which the median counts (3)"},
    {0, "chunk", "N", COMPUTES, &opt.chunk, 0, 4096, "prompt tokens at a time (512)"},
    {0, "no-mmap", nullptr, ALL, &opt.no_mmap, 0, 0, "read the model into memory instead of mapping it"},
    {0, "json", nullptr, RUN | TOKENIZE | INFO | PERPLEXITY | BENCH, &opt.json, 0, 0, "print JSON"},
    {'q', "quiet", nullptr, ALL, &opt.quiet, 0, 0, "nothing on stderr but errors"},
    {'v', "verbose", nullptr, COMPUTES, &opt.verbose, 0, 0, "the model's facts and the library's messages on stderr"},
    {'h', "help", nullptr, ALL, &opt.help, 0, 0, "this text"},
};

struct command {
    const char *name;
    unsigned bit;
    void (*run)();
    const char *summary, *about;
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

// Stores one value. Returns false when it is wrong; `range` then says what would be right.
bool store_option(const option_row &row, const char *text, string &range) {
    const option_target &to = row.target;
    uint64_t whole = 0;
    switch (to.kind) {
    case FLAG:
        return to.get<bool>() = true;
    case TEXT:
        to.get<const char *>() = text;
        return true;
    case TEXTS:
        range = "some text";
        to.get<vector<const char *>>().push_back(text);
        return *text;
    case NUMBER:
        range = strf("a whole number from %.0f to %.0f", row.lo, row.hi);
        if (row.lo == -1 && strcmp(text, "-1") == 0)
            text = "0";
        if (!parse_whole(text, row.lo, row.hi, whole))
            return false;
        to.get<int>() = int(whole);
        return true;
    case REAL:
        range = strf("a number from %g to %g", row.lo, row.hi);
        return parse_real(text, row.lo, row.hi, to.get<double>());
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
    static const char *const other_names[][2] = {
        {"temperature", "temp"}, {"ctx-size", "ctx"}, {"n-predict", "max-tokens"}};
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
            opt.given.push_back(size_t(row - option_table));
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
        text += strf("%-26s %s\n", left.c_str(), row.help);
    }
    return text;
}

// ---------------------------------------------------------------------------------------------------
// 4. JSON
//
// Enough to write it. Invariant: whatever bytes come in, valid JSON in UTF-8 goes out.
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

bool is_utf8(const string &s) {
    for (size_t i = 0, n; i < s.size(); i += n)
        if (!(n = character_length(&s[i], s.size() - i)))
            return false;
    return true;
}

string json_string(const string &s) {
    string out = "\"";
    for (size_t i = 0; i < s.size();) {
        const size_t n = character_length(&s[i], s.size() - i);
        if (n == 0)
            out += "\xef\xbf\xbd", i++;
        else if (s[i] == '"' || s[i] == '\\')
            out += '\\', out += s[i++];
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

// ---------------------------------------------------------------------------------------------------
// 5. MODEL
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
        {"backend", json_string(i.backend), "runs on", i.backend + strf(", %d threads", i.threads)},
        {"threads", num(i.threads), nullptr, ""},
        {"generic_ops", json_string(i.generic_ops), "generic path", *i.generic_ops ? i.generic_ops : "none"},
    };
}

struct opened {
    engine_model *model = nullptr;
    engine_session *session = nullptr;
    engine_model_info info = {};
    engine_error err = {};

    opened() {
        engine_open_options open_opt = {};
        open_opt.size = sizeof open_opt;
        open_opt.threads = opt.threads;
        open_opt.no_mmap = opt.no_mmap;
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
    void start(int ctx, int chunk) {
        engine_session_options session_opt = {};
        session_opt.size = sizeof session_opt;
        session_opt.n_ctx = ctx;
        session_opt.chunk = chunk;
        check(engine_session_new(&session, model, &session_opt, &err));
        computing = session;
        if (verbosity < 2)
            return;
        for (const fact &f : facts_of(info))
            if (f.label)
                note("%-16s %s", f.label, f.text.c_str());
        note("%-16s %d tokens", "context in use", engine_session_ctx(session));
    }

    vector<int32_t> tokenize(const string &text, int flags) {
        return fill<vector<int32_t>>(text.size() / 2 + 64, 0, [&](int32_t *out, size_t cap) {
            return engine_tokenize(model, text.data(), text.size(), flags, out, cap, &err);
        });
    }
    vector<int32_t> render(const vector<engine_message> &messages) {
        size_t guess = 64;
        for (const engine_message &m : messages)
            guess += strlen(m.content) / 2 + 64;
        return fill<vector<int32_t>>(guess, 0, [&](int32_t *out, size_t cap) {
            return engine_render_chat(model, messages.data(), messages.size(), nullptr, out, cap, &err);
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

  private:
    // Calls get(data, capacity) until all that it has to give fits, with room for `extra` items more (a NUL).
    template <class T, class F> T fill(size_t guess, size_t extra, F get) const {
        for (T out;;) {
            out.resize(guess);
            const size_t n = size_t(check(get(&out[0], out.size())));
            guess = n + extra;
            if (guess <= out.size()) {
                out.resize(n);
                return out;
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------
// 6. PROMPT
//
// What -p, -f and stdin make together.
// ---------------------------------------------------------------------------------------------------

const size_t INPUT_LIMIT = size_t(1) << 28; // bytes; a longer text is a mistake, such as an endless pipe

// path "-": stdin.
string read_input(const char *path) {
    const bool is_stdin = strcmp(path, "-") == 0;
    const int fd = is_stdin ? 0 : open(path, O_RDONLY | O_CLOEXEC);
    const char *name = is_stdin ? "standard input" : path;
    string out;
    vector<char> buf(1 << 16);
    for (ssize_t n = 1; n != 0;) {
        n = fd < 0 ? -1 : read(fd, buf.data(), buf.size());
        if (n < 0 && errno == EAGAIN) { // a non-blocking stdin, inherited
            pollfd p = {fd, POLLIN, 0};
            poll(&p, 1, -1);
        } else if (n < 0 && errno != EINTR) {
            fail(EXIT_ERROR, "%s: %s", name, strerror(errno));
        }
        out.append(buf.data(), size_t(std::max<ssize_t>(n, 0)));
        if (out.size() > INPUT_LIMIT)
            fail(EXIT_ERROR, "%s: more than %zu MiB of text", name, INPUT_LIMIT >> 20);
    }
    if (!is_stdin)
        close(fd);
    return out;
}

bool is_blank(const string &s) { return s.find_first_not_of(" \t\r\n\v\f") == string::npos; }

void drop_newline(string &s) {
    if (!s.empty() && s.back() == '\n') {
        s.pop_back();
        if (!s.empty() && s.back() == '\r')
            s.pop_back();
    }
}

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

// Messages end at a NUL, so there it becomes U+FFFD.
string without_nul(const string &s) {
    string out;
    for (char c : s)
        c ? out += c : out += "\xef\xbf\xbd";
    return out;
}

vector<int32_t> prompt_ids(opened &m, const string &prompt) {
    if (m.info.has_template && !opt.raw) {
        const string content = without_nul(prompt);
        vector<engine_message> messages;
        if (opt.system)
            messages.push_back({"system", opt.system});
        messages.push_back({"user", content.c_str()});
        return m.render(messages);
    }
    if (!opt.raw && opt.system)
        fail(EXIT_ERROR, "%s has no chat template, so -s/--system cannot be used with it", opt.model);
    if (!opt.raw)
        note("%s has no chat template: completing the text as it is", opt.model);
    vector<int32_t> ids = m.tokenize(prompt, ENGINE_ADD_BOS | (opt.raw ? ENGINE_PARSE_SPECIAL : 0));
    if (ids.empty())
        fail(EXIT_USAGE, "no prompt: the text makes no token");
    return ids;
}

// ---------------------------------------------------------------------------------------------------
// 7. ANSWER
//
// Tokens in, streamed text and one line of statistics out; the same for run and chat.
// ---------------------------------------------------------------------------------------------------

struct answer {
    bool stream; // write the text as it comes
    uint64_t seed;
    double start = 0, first_text = 0;
    string text;
    int write_code = 0; // errno of stdout
    int code = 0;       // ENGINE_E*
    engine_error err = {};
    engine_result result = {};

    answer(bool to_stdout, uint64_t s) : stream(to_stdout), seed(s) {}

    static int on_text(void *user, const char *text, size_t len) {
        answer &a = *static_cast<answer *>(user);
        if (!a.first_text)
            a.first_text = now_seconds();
        a.text.append(text, len);
        if (a.stream)
            a.write_code = write_out(text, len);
        return a.write_code;
    }
    bool interrupted() const { return code == ENGINE_ECANCELLED || write_code == EINTR; }
    bool context_full() const { return code == 0 && result.reason == ENGINE_STOP_CONTEXT; }
    const char *finish_reason() const {
        static const char *const names[] = {"stop", "length", "context", "stop_string"}; // ENGINE_STOP_*
        return interrupted() ? "cancelled" : names[result.reason];
    }
};

// 32 random bits, short enough to be typed again, unless there is a --seed.
uint64_t first_seed() { return opt.seed == UINT64_MAX ? std::random_device{}() : opt.seed; }

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
    engine_generate_options gen = {};
    gen.size = sizeof gen;
    engine_sampling sampling = {};
    sampling.size = sizeof sampling;
    sampling.temperature = float(opt.temp);
    sampling.top_k = opt.top_k;
    sampling.top_p = float(opt.top_p);
    sampling.min_p = float(opt.min_p);
    sampling.seed = a.seed;
    gen.sampling = &sampling;
    gen.max_tokens = opt.max_tokens;
    gen.stops = opt.stops.data();
    gen.n_stops = opt.stops.size();
    gen.ignore_end = opt.ignore_eos;
    if (a.code >= 0)
        a.code = engine_generate(m.session, &gen, answer::on_text, &a, &a.result, &a.err);
    if (a.write_code && a.write_code != EINTR)
        leave_unwritten(a.write_code);
}

double per_second(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

void print_notes(opened &m, const answer &a) {
    if (a.context_full())
        note("stopped: the context of %d tokens is full", engine_session_ctx(m.session));
    const engine_session_stats s = m.stats();
    const int64_t done = std::min(s.prompt_tokens, s.n_tokens); // less than the prompt when that was interrupted
    string line = "prompt " + (done < s.prompt_tokens ? strf("%lld of ", (long long)done) : "") +
                  strf("%lld tokens (%lld reused)", (long long)s.prompt_tokens, (long long)s.reused_tokens);
    if (a.first_text)
        line += strf(", TTFT %.3f s", a.first_text - a.start);
    if (done > s.reused_tokens && s.prefill_seconds > 0)
        line += strf(", prefill %.1f tok/s", double(done - s.reused_tokens) / s.prefill_seconds);
    line += strf(" | answer %d tokens (%s)", a.result.n_tokens, a.finish_reason());
    if (s.decode_tokens)
        line += strf(", ITL p50 %.2f p99 %.2f ms, decode %.1f tok/s, %.2f GB/s", s.itl_p50 * 1e3, s.itl_p99 * 1e3,
                     per_second(double(s.decode_tokens), s.decode_seconds),
                     per_second(double(s.decode_bytes) * 1e-9, s.decode_seconds));
    if (opt.temp > 0)
        line += strf(" | seed %llu", (unsigned long long)a.seed);
    note("%s", line.c_str());
}

string answer_json(opened &m, const answer &a, size_t n_prompt) {
    const engine_session_stats s = m.stats();
    vector<int32_t> ids = m.timeline();
    ids.erase(ids.begin(), ids.begin() + ptrdiff_t(std::min(n_prompt, ids.size())));
    string out = "{\"text\":" + json_string(a.text) + ",\"ids\":" + json_ids(ids);
    out += strf(",\"finish_reason\":\"%s\",\"prompt_tokens\":%zu,\"reused_tokens\":%lld", a.finish_reason(), n_prompt,
                (long long)s.reused_tokens);
    out += ",\"seed\":" + (opt.temp > 0 ? std::to_string(a.seed) : "null");
    out += ",\"ttft_s\":" + (a.first_text ? json_number(a.first_text - a.start) : "null");
    out += ",\"prefill_s\":" + json_number(s.prefill_seconds) + ",\"decode_s\":" + json_number(s.decode_seconds);
    out += ",\"decode_tokens\":" + std::to_string(s.decode_tokens) + ",\"itl_p50_s\":" + json_number(s.itl_p50);
    return out + ",\"itl_p99_s\":" + json_number(s.itl_p99) + "}\n";
}

void print_logits(opened &m, const vector<int32_t> &ids) {
    const float *logits;
    m.check(engine_sync(m.session, ids.data(), ids.size(), &m.err));
    leave_if_caught();
    const int n = m.check(engine_logits(m.session, &logits, &m.err));
    print(strf("{\"n_vocab\":%d,\"prompt_ids\":", n) + json_ids(ids) +
          ",\"logits\":" + json_list(logits, size_t(n), [](float x) { return json_number(double(x)); }) + "}\n");
}

// Also what chat does when it is not on a terminal.
void answer_once(const char *missing) {
    if (opt.raw && opt.system)
        fail(EXIT_USAGE, "--raw uses no chat template, so it cannot be used with -s/--system");
    if (!opt.prompt && !opt.file && isatty(0))
        fail(EXIT_USAGE, "%s", missing);
    for (size_t i : opt.given)
        if (opt.logits && option_table[i].commands & SHAPES_ANSWER)
            note("--logits gives no answer: %s has no effect", option_label(option_table[i]).c_str());
    opened m;
    const vector<int32_t> ids = prompt_ids(m, read_prompt(missing));
    m.start(opt.ctx, opt.chunk);
    const int ctx = engine_session_ctx(m.session);
    if (ids.size() > size_t(ctx))
        fail(EXIT_ERROR, "the prompt has %zu tokens and exceeds the available context size of %d tokens (-c)",
             ids.size(), ctx);
    if (opt.logits)
        return print_logits(m, ids);

    answer a(!opt.json, first_seed());
    make_answer(m, ids, a);
    const bool failed = a.code < 0 && !a.interrupted();
    if (opt.json && !failed)
        print(answer_json(m, a, ids.size()));
    else if (!opt.json && !a.write_code && (a.code == 0 || !a.text.empty()))
        print("\n");
    if (failed)
        fail(EXIT_ERROR, "%s", a.err.msg);
    print_notes(m, a);
    leave_if_caught();
}

void cmd_run() { answer_once(no_prompt); }

// ---------------------------------------------------------------------------------------------------
// 8. CHAT
//
// The conversation is a list of messages that is rendered anew for every answer; engine_sync finds what the
// session already holds. Invariant: a message or an answer leaves the list only when the user is told.
// ---------------------------------------------------------------------------------------------------

// Reads lines from the terminal: through libedit where the build has it, else as the terminal gives them.
struct line_reader {
    enum outcome { LINE, END, INTERRUPT };
    enum { PASTE_GAP = 50 }; // milliseconds of silence that end a paste
    bool had_text = false;   // INTERRUPT came with something typed, where that can be known
    bool ended = false;      // the end of the input was read, after `pending`
    string pending;          // read, and not yet taken

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
        while (!caught && !resumed) {
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
            if ((show || resumed.exchange(false)) && write_out(prompt, strlen(prompt)))
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

    // libedit's source of characters: 1 for one, 0 at the end, -1 when a signal came. What follows a line is read
    // here, before libedit gives the terminal back its own line editing, which would cut it.
    static int next_character(EditLine *editor, wchar_t *out) {
        line_reader &self = of(editor);
        for (mbstate_t state = {};;) {
            while (self.pending.empty() && !self.ended) {
                if (wait_key()) {
                    self.fill(0);
                } else if (caught) {
                    const LineInfo *line = el_line(editor);
                    self.had_text = line->lastchar > line->buffer;
                    return -1;
                } else {
                    resumed = false;
                    el_set(editor, EL_PREP_TERM, 1);
                    el_set(editor, EL_REFRESH);
                }
            }
            if (self.pending.empty())
                return self.ended = false;
            const size_t used = mbrtowc(out, &self.pending[0], 1, &state);
            self.pending.erase(0, 1);
            if (used == size_t(-2))
                continue;
            if (used == size_t(-1))
                *out = 0xfffd;
            if (*out == '\n' || *out == '\r')
                self.fill(PASTE_GAP);
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
        el_set(editor, EL_BIND, "^I", "ed-insert", nullptr); // there is nothing to complete, and code has tabs
    }
    ~line_reader() {
        if (editor)
            el_end(editor);
        if (history)
            history_end(history);
    }

    outcome read_edited(const char *prompt, string &line) {
        if (take_line(line)) { // of a paste: no one edits it, and the terminal has not shown it
            string shown = prompt + line;
            for (char &c : shown)
                c = (unsigned char)c < 32 && c != '\t' ? '?' : c;
            shown += "\n";
            return write_out(shown.data(), shown.size()) ? END : LINE;
        }
        prompt_text = prompt;
        int n = 0;
        el_set(editor, EL_PREP_TERM, 1); // before the prompt shows, so that no key is taken the old way
        const char *text = el_gets(editor, &n);
        if (caught)
            return INTERRUPT;
        if (!text || n <= 0)
            return END;
        HistEvent event;
        line.assign(text, size_t(n));
        drop_newline(line);
        if (!is_blank(line))
            ::history(history, &event, H_ENTER, line.c_str());
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
            pending.clear();
        return got;
    }

    // A line and those that came together with it, a paste; or all that stands between """ and """.
    outcome read_message(string &text, bool &block) {
        static const string quotes = "\"\"\"";
        block = false;
        string line;
        if (const outcome got = read_line("> ", text))
            return got;
        const size_t start = std::min(text.find_first_not_of(" \t"), text.size());
        if (text.compare(start, 1, "/") == 0)
            return LINE;
        if (text.compare(start, 3, quotes) != 0) {
            outcome got = LINE;
            while (!pending.empty() && (got = read_line("... ", line)) == LINE)
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

const char chat_help[] =
    "  /help, /?       this text\n"
    "  /clear          forget the conversation (the system message stays)\n"
    "  /regen          answer the last message again, with another seed\n"
    "  /system TEXT    set the system message; alone: show it; /system - removes it\n"
    "  /stats          tokens and memory in use\n"
    "  /exit           leave (also /bye, /quit, Ctrl-D)\n"
    "  \"\"\"             begins and ends a message of several lines (those of a paste are one anyway)\n"
    "  Ctrl-C stops an answer; once more, or twice at the prompt, leaves\n";

struct chat_message {
    string role, content;
};

struct chat {
    opened &m;
    vector<chat_message> messages; // without the system message
    string system;
    bool has_system;
    uint64_t seed;

    explicit chat(opened &model)
        : m(model), system(opt.system ? opt.system : ""), has_system(opt.system), seed(first_seed()) {}

    // Answers the last message, which is the user's. Where there is room for a few words only, it is refused.
    void answer_last() {
        vector<engine_message> list;
        if (has_system)
            list.push_back({"system", system.c_str()});
        for (const chat_message &c : messages)
            list.push_back({c.role.c_str(), c.content.c_str()});
        const vector<int32_t> ids = m.render(list);
        const int ctx = engine_session_ctx(m.session), least = std::min(32, ctx / 8);
        if (ids.size() + size_t(opt.max_tokens ? std::min(opt.max_tokens, least) : least) > size_t(ctx)) {
            messages.pop_back();
            fail(EXIT_ERROR,
                 "not answered: with this message the prompt has %zu tokens, too many for an answer in the "
                 "context of %d; /clear begins anew, a larger context is set with -c",
                 ids.size(), ctx);
        }
        answer a(true, seed);
        make_answer(m, ids, a);
        if (!a.write_code && (!a.text.empty() || a.interrupted()))
            print("\n");
        if (a.code == 0 || !a.text.empty())
            messages.push_back({"assistant", without_nul(a.text)});
        else
            note("no answer yet; /regen tries again");
        if (a.code < 0 && !a.interrupted())
            fail(EXIT_ERROR, "%s", a.err.msg);
        print_notes(m, a);
    }

    // A line that begins with '/'.
    void obey(const string &line) {
        const size_t space = line.find_first_of(" \t");
        const string word = line.substr(0, space);
        const size_t rest = space == string::npos ? space : line.find_first_not_of(" \t", space);
        const string text = rest == string::npos ? "" : line.substr(rest);
        const vector<string> names = {"/help", "/?", "/clear", "/regen", "/system", "/stats", "/exit", "/bye", "/quit"};
        if (!text.empty() && word != "/system" && std::find(names.begin(), names.end(), word) != names.end())
            fail(EXIT_ERROR, "%s takes no argument", word.c_str());
        if (word == "/exit" || word == "/bye" || word == "/quit")
            throw quit{EXIT_OK};
        if (word == "/help" || word == "/?")
            dprintf(2, "%s", chat_help);
        else if (word == "/clear") {
            m.check(engine_rewind(m.session, 0, &m.err));
            messages.clear();
            note("conversation cleared");
        } else if (word == "/regen") {
            if (!messages.empty() && messages.back().role == "assistant")
                messages.pop_back();
            if (messages.empty())
                fail(EXIT_ERROR, "there is nothing to answer yet");
            seed++;
            answer_last();
        } else if (word == "/system" && text.empty()) {
            dprintf(2, "%s\n", has_system ? system.c_str() : "(no system message)");
        } else if (word == "/system") {
            has_system = text != "-";
            system = has_system ? text : "";
            note(has_system ? "system message set" : "system message removed");
        } else if (word == "/stats") {
            const engine_session_stats s = m.stats();
            dprintf(2, "%lld of %d tokens, %.2f MiB of KV cache, %zu messages\n", (long long)s.n_tokens,
                    engine_session_ctx(m.session), double(s.kv_bytes) / (1 << 20), messages.size());
        } else
            fail(EXIT_ERROR, "no command %s.%s /help lists them; a message that begins with / goes between \"\"\"",
                 word.c_str(), did_you_mean(word, names).c_str());
    }

    void take(string text, bool block) {
        if (is_blank(text))
            return;
        const size_t start = text.find_first_not_of(" \t");
        if (!block && text[start] == '/')
            return obey(text.substr(start, text.find_last_not_of(" \t\r") + 1 - start));
        if (!messages.empty() && messages.back().role == "user") {
            messages.pop_back();
            note("the message before, which got no answer, is dropped");
        }
        messages.push_back({"user", without_nul(std::move(text))});
        answer_last();
    }
};

void cmd_chat() {
    if (!isatty(0))
        return answer_once("no prompt: standard input has no text, and is no terminal to chat on");
    if (!isatty(1))
        fail(EXIT_USAGE, "chat needs a terminal for its output too; engine run answers one prompt");
    opened m;
    if (!m.info.has_template)
        fail(EXIT_ERROR, "%s has no chat template; 'engine run' completes text with it", opt.model);
    m.start(opt.ctx, opt.chunk);
    if (pipe(wake_pipe) < 0)
        fail(EXIT_ERROR, "pipe: %s", strerror(errno));
    for (int fd : wake_pipe)
        fcntl(fd, F_SETFL, O_NONBLOCK);
    struct sigaction act = {};
    act.sa_handler = on_signal;
    sigaction(SIGCONT, &act, nullptr);

    note("%s, %d tokens of context; /help lists the commands, Ctrl-D leaves", m.info.name,
         engine_session_ctx(m.session));
    chat c(m);
    line_reader reader;
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
        } catch (const quit &q) { // an error ends the turn, not the conversation
            if (q.code != EXIT_ERROR)
                throw;
        }
        const int signal = caught.exchange(0);
        if (signal == SIGTERM || (signal && ++strikes == 2))
            throw quit{128 + signal};
        if (signal && got == line_reader::INTERRUPT)
            note("Ctrl-C again, or Ctrl-D, leaves");
    }
}

// ---------------------------------------------------------------------------------------------------
// 9. COMMANDS
//
// tokenize, info, perplexity and bench: each prints one result on stdout, for people or with --json.
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

// Keys are looked for at the beginnings of lines; a value's own lines are told apart by asking for them.
string meta_json(opened &m) {
    const string all = m.meta(nullptr);
    vector<string> seen;
    string out = "{";
    for (size_t at = 0, end; at < all.size(); at = end + 1) {
        end = std::min(all.find('\n', at), all.size());
        const string key = all.substr(at, std::min(all.find(" = ", at), end) - at);
        if (std::find(seen.begin(), seen.end(), key) != seen.end() ||
            engine_meta(m.model, key.c_str(), nullptr, 0, nullptr) < 0)
            continue;
        out += (seen.empty() ? "" : ",") + json_string(key) + ":" + json_string(m.meta(key.c_str()));
        seen.push_back(key);
    }
    return out + "}";
}

void cmd_info() {
    opened m;
    string json, text;
    for (const fact &f : facts_of(m.info)) {
        json += strf("%s\"%s\":%s", json.empty() ? "{" : ",", f.key, f.value.c_str());
        if (f.label)
            text += strf("%-16s %s\n", f.label, f.text.c_str());
    }
    if (opt.json)
        print(json + (opt.meta ? ",\"meta\":" + meta_json(m) : "") + "}\n");
    else
        print(opt.meta ? text + "\n" + m.meta(nullptr) + "\n" : text);
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
        fail(EXIT_ERROR, "the text has %zu tokens: there is nothing to score", ids.size());
    m.start(int(size), opt.chunk);
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
        const double start = now_seconds();
        vector<std::thread> pool;
        const auto read = [&](size_t t) {
            uint64_t *mine = &data[share * t], sums[lanes] = {};
            if (pass == 0)
                std::fill(mine, mine + share, t + 1);
            else
                for (size_t i = 0; i < share; i += lanes)
                    for (size_t k = 0; k < lanes; k++)
                        sums[k] += mine[i + k];
            for (uint64_t s : sums)
                total += s; // used, so that the loop stays
        };
        try {
            for (size_t t = 0; t < n; t++)
                pool.emplace_back(read, t);
        } catch (const std::exception &) { // no more threads: no figure
        }
        for (std::thread &t : pool)
            t.join();
        if (pool.size() < n)
            return 0;
        if (pass)
            best = std::max(best, per_second(double(share * n * sizeof(uint64_t)), now_seconds() - start));
    }
    return total ? best : 0;
}

// Tokens per second of each repetition of `tokens` ids after `depth` ones, all at once or one by one, in ascending
// order; and the bytes that one single-token step reads.
vector<double> bench_rates(opened &m, const vector<int32_t> &ids, int depth, bool decode, double &step_bytes) {
    const int tokens = decode ? opt.bench_decode : opt.bench_prefill, batch = decode ? 1 : tokens;
    vector<double> rates;
    for (int r = -1; r < opt.repeat; r++) { // -1: warms caches and threads, with less
        const int n = r < 0 ? std::min(tokens, decode ? 4 : 32) : tokens;
        const float *logits;
        m.check(engine_sync(m.session, ids.data(), size_t(depth), &m.err)); // the same start every time, from the cache
        const engine_session_stats before = m.stats();
        const double start = now_seconds();
        for (int i = 0; i < n; i += batch) {
            m.check(engine_eval(m.session, ids.data() + depth + i, size_t(std::min(batch, n)), &m.err));
            m.check(engine_logits(m.session, &logits, &m.err));
            leave_if_caught();
        }
        const double seconds = now_seconds() - start;
        const engine_session_stats after = m.stats();
        step_bytes = per_second(double(after.decode_bytes - before.decode_bytes),
                                double(after.decode_tokens - before.decode_tokens));
        if (r >= 0)
            rates.push_back(per_second(n, seconds));
    }
    std::sort(rates.begin(), rates.end());
    return rates;
}

struct bench_row {
    bool decode;
    int depth, tokens;
    double rate, least, most; // tokens per second: the median, and the ends
    double bytes;             // that one decode step reads; NAN for prefill, which computes more than it reads
    const char *name() const { return decode ? "decode" : "prefill"; }
    double speed() const { return bytes * rate; } // bytes per second
};

string bench_json(const engine_model_info &i, double bandwidth, const vector<bench_row> &rows) {
    string out = "{\"model\":" + json_string(i.name) + ",\"arch\":" + json_string(i.arch) +
                 ",\"types\":" + json_string(i.types) + ",\"backend\":" + json_string(i.backend) +
                 strf(",\"threads\":%d", i.threads) + ",\"generic_ops\":" + json_string(i.generic_ops) +
                 ",\"bandwidth_gb_s\":" + json_number(bandwidth * 1e-9) + ",\"rows\":";
    return out +
           json_list(rows.data(), rows.size(),
                     [&](const bench_row &r) {
                         string row = strf("{\"test\":\"%s\",\"depth\":%d,\"tokens\":%d", r.name(), r.depth, r.tokens);
                         row += ",\"tok_s\":" + json_number(r.rate) + ",\"min_tok_s\":" + json_number(r.least);
                         row +=
                             ",\"max_tok_s\":" + json_number(r.most) + ",\"bytes_per_token\":" + json_number(r.bytes);
                         row += ",\"gb_s\":" + json_number(r.speed() * 1e-9);
                         return row + ",\"bandwidth_share\":" + json_number(r.speed() / bandwidth) + "}";
                     }) +
           "}\n";
}

string bench_text(const engine_model_info &i, double bandwidth, const vector<bench_row> &rows) {
    string out = strf("%s (%s, %s parameters, %s)\n%s, %d threads, memory bandwidth %.2f GB/s, generic path: %s\n\n",
                      i.name, i.arch, scaled(double(i.n_params), "").c_str(), i.types, i.backend, i.threads,
                      bandwidth * 1e-9, *i.generic_ops ? i.generic_ops : "none");
    out += "test       depth  tokens       tok/s   slowest   fastest";
    out += opt.bench_decode ? "  MB/token     GB/s  of bandwidth\n" : "\n";
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
    return out + (cached ? "\nMore than the memory's bandwidth: this model fits into the processor's cache.\n" : "");
}

void cmd_bench() {
    if (!opt.bench_prefill && !opt.bench_decode)
        fail(EXIT_USAGE, "-p 0 and -n 0 leave nothing to measure");
    const vector<int> depths = opt.depths.empty() ? vector<int>{0} : opt.depths;
    const int64_t most =
        int64_t(*std::max_element(depths.begin(), depths.end())) + std::max(opt.bench_prefill, opt.bench_decode);
    if (most > INT_MAX)
        fail(EXIT_USAGE, "-p, -n and --depth add up to %lld tokens", (long long)most);
    opened m;
    const double bandwidth = measure_bandwidth(m.info.threads); // before the cache takes memory
    m.start(int(most), opt.chunk);
    std::mt19937 random(1);
    vector<int32_t> ids(static_cast<size_t>(most));
    for (int32_t &id : ids)
        id = int32_t(random() % uint32_t(m.info.n_vocab));
    vector<bench_row> rows;
    progress bar{"bench"};
    for (size_t d = 0; d < depths.size(); d++)
        for (const bool decode : {false, true}) {
            const int tokens = decode ? opt.bench_decode : opt.bench_prefill;
            if (bar_wanted())
                bar.at(int64_t(2 * d + decode), int64_t(2 * depths.size()));
            if (!tokens)
                continue;
            double bytes = NAN;
            const vector<double> rates = bench_rates(m, ids, depths[d], decode, bytes);
            const double median = (rates[(rates.size() - 1) / 2] + rates[rates.size() / 2]) / 2;
            rows.push_back({decode, depths[d], tokens, median, rates.front(), rates.back(), decode ? bytes : NAN});
        }
    print((opt.json ? bench_json : bench_text)(m.info, bandwidth, rows));
}

// ---------------------------------------------------------------------------------------------------
// 10. MAIN
//
// The table of commands; finds one and runs it.
// ---------------------------------------------------------------------------------------------------

const command command_table[] = {
    {"run", RUN, cmd_run, "answer one prompt",
     "The prompt is -p TEXT, then the file of -f, then stdin unless that is a terminal, with a blank line\n"
     "between them. One trailing newline of a file and of stdin is dropped. Stdin is read to its end; where\n"
     "it is open but silent, use < /dev/null. The prompt goes through the model's chat template (a NUL in it\n"
     "becomes U+FFFD); a model without one, or --raw, gets the text itself. The answer and a newline go to\n"
     "stdout, statistics to stderr.\n"},
    {"chat", CHAT, cmd_chat, "talk with the model on a terminal",
     "Ctrl-C stops an answer, a second one leaves (130); Ctrl-D leaves (0); /help lists the commands. When\n"
     "stdin is not a terminal it is answered as one prompt, as by run.\n"},
    {"tokenize", TOKENIZE, cmd_tokenize, "turn text into token numbers, or back",
     "Reads stdin, or -p TEXT, or -f FILE, byte for byte, and prints the numbers on one line: what the model\n"
     "would be fed, so with the BOS that it wants. --json adds the pieces (one that is no valid UTF-8 as a\n"
     "list of bytes).\n"},
    {"info", INFO, cmd_info, "print a model's facts", ""},
    {"perplexity", PERPLEXITY, cmd_perplexity, "measure how well the model predicts a text",
     "The text (-f FILE or stdin) is cut into windows of -c tokens, each evaluated from an empty context;\n"
     "where the model wants a BOS it starts each window. Every token but a window's first is scored, those\n"
     "of a short last window too. Prints the mean negative log-likelihood in nats and its exponential.\n"},
    {"bench", BENCH, cmd_bench, "measure speed",
     "Prefill and decode with random tokens, beside the memory bandwidth that this machine reaches when it\n"
     "only reads.\n"},
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
    if (cmd && !help)
        parse_options(*cmd, argc - 2, argv + 2);
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
