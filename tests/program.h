// program.h: the engine program from outside, through real pipes and a real terminal, for the tests that run it. The
// program is $ENGINE_BIN, or ./engine in the repository's root; the model is the one in models/.
#ifndef PROGRAM_H
#define PROGRAM_H

#include "util.h"

#include <algorithm>
#include <functional>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <termios.h>

#include "gguf_writer.h"

using test::command_result;

inline std::string cli_engine() {
    const char *bin = getenv("ENGINE_BIN");
    return bin && *bin ? bin : test::root_path("engine");
}
inline std::string cli_model() {
    const std::string own = test::root_path("models/tiny-chat-q8_0.gguf");
    return test::exists(own) ? own : test::shared_path("tiny-chat/tiny-chat-q8_0.gguf");
}

// engine COMMAND MODEL args..., fed with `input`.
inline command_result cli_run(const std::string &command, std::vector<std::string> args, const std::string &input = "",
                              const std::string &model = cli_model()) {
    args.insert(args.begin(), {cli_engine(), command, model});
    return test::run(args, input);
}
// A shell line in which $E is the program and $M the model.
inline command_result cli_shell(const std::string &line) {
    return test::shell("E='" + cli_engine() + "'; M='" + cli_model() + "'; " + line);
}

inline bool cli_has(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }
inline bool cli_one_line(const std::string &s) { return s.size() > 1 && s.find('\n') == s.size() - 1; }

// The numbers of the JSON list that follows "key":
inline std::vector<double> cli_numbers(const std::string &json, const std::string &key) {
    std::vector<double> out;
    size_t at = json.find("\"" + key + "\":[");
    EXPECT_NE(at, std::string::npos) << key << " is not in " << json.substr(0, 200);
    if (at == std::string::npos)
        return out;
    for (const char *p = json.c_str() + json.find('[', at) + 1; *p && *p != ']';) {
        char *end;
        out.push_back(strtod(p, &end));
        if (end == p || (*end != ',' && *end != ']')) {
            ADD_FAILURE() << key << ": no number at " << std::string(p).substr(0, 40);
            return out;
        }
        p = end + (*end == ',');
    }
    return out;
}

// Whether s is one JSON value (RFC 8259), moving p past it.
inline bool cli_json(const char *&p) {
    const auto skip = [&p] { p += strspn(p, " \t\r\n"); };
    skip();
    if (*p == '"') {
        for (p++; *p && *p != '"'; p++)
            if ((unsigned char)*p < 0x20 || (*p == '\\' && !strchr("\"\\/bfnrtu", *++p)))
                return false;
        return *p++ == '"';
    }
    if (*p == '{' || *p == '[') {
        const char close = *p == '{' ? '}' : ']';
        p++, skip();
        for (bool first = true; *p != close; first = false) {
            if (!first && *p++ != ',')
                return false;
            if (close == '}' && (skip(), *p != '"' || !cli_json(p) || (skip(), *p++ != ':')))
                return false;
            if (!cli_json(p))
                return false;
            skip();
        }
        p++;
        return true;
    }
    for (const char *word : {"true", "false", "null"})
        if (strncmp(p, word, strlen(word)) == 0) {
            p += strlen(word);
            return true;
        }
    char *end;
    strtod(p, &end);
    const bool number = end != p && (*p == '-' || (*p >= '0' && *p <= '9'));
    p = end;
    return number;
}
inline bool cli_is_json(const std::string &s) {
    const char *p = s.c_str();
    return cli_json(p) && strcmp(p, "\n") == 0;
}

// Where a program runs.
struct cli_place {
    bool terminal = false;            // in a terminal of 24 lines and 200 columns, else its output is in a pipe
    std::vector<std::string> env;     // "NAME=VALUE"
    rlim_t file_size = RLIM_INFINITY; // no file may grow beyond this
    bool ignore_interrupt = false;    // SIGINT is ignored, as nohup and background jobs do
    std::string program = cli_engine();
};
inline cli_place cli_terminal(std::vector<std::string> env = {}) {
    cli_place place;
    place.terminal = true;
    place.env = std::move(env);
    return place;
}

// Where the chats of these tests keep their history.
inline const std::string &cli_state() {
    static const test::temp_dir dir;
    return dir.path;
}

// A running program, to be typed to and signalled while it works.
struct cli_child {
    pid_t pid = -1;
    int in = -1, out = -1;

    explicit cli_child(std::vector<std::string> args, const cli_place &place = {}) {
        args.insert(args.begin(), place.program);
        const std::string &state = cli_state();
        int to[2], from[2];
        if (place.terminal) {
            winsize size = {24, 200, 0, 0};
            pid = forkpty(&out, nullptr, nullptr, &size);
        } else {
            if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC))
                return;
            pid = fork();
        }
        if (pid == 0) {
            if (!place.terminal)
                dup2(to[0], 0), dup2(from[1], 1);
            setenv("XDG_STATE_HOME", state.c_str(), 1);
            for (const std::string &e : place.env)
                putenv(const_cast<char *>(e.c_str()));
            if (place.file_size != RLIM_INFINITY) {
                const rlimit limit = {place.file_size, place.file_size};
                setrlimit(RLIMIT_FSIZE, &limit);
            }
            if (place.ignore_interrupt)
                signal(SIGINT, SIG_IGN);
            std::vector<char *> argv;
            for (std::string &a : args)
                argv.push_back(&a[0]);
            argv.push_back(nullptr);
            execv(argv[0], argv.data());
            _exit(127);
        }
        if (place.terminal) {
            in = out;
            termios t; // terminals of today erase whole characters
            if (tcgetattr(out, &t) == 0) {
                t.c_iflag |= IUTF8;
                tcsetattr(out, TCSANOW, &t);
            }
        } else {
            close(to[0]), close(from[1]);
            in = to[1], out = from[0];
        }
    }
    ~cli_child() {
        if (pid > 0) {
            kill(pid, SIGKILL);
            waitpid(pid, nullptr, 0);
        }
        if (in >= 0 && in != out)
            close(in);
        close(out);
    }
    cli_child(const cli_child &) = delete;

    void type(const std::string &text) {
        ASSERT_EQ(write(in, text.data(), text.size()), ssize_t(text.size())) << strerror(errno);
    }
    void close_input() { close(in), in = -1; }

    // Types a text of any length, and reads what the program shows meanwhile: a terminal holds a few kB each way.
    std::string paste(const std::string &text) {
        std::string got;
        fcntl(in, F_SETFL, O_NONBLOCK);
        const time_t end = time(nullptr) + 60;
        for (size_t at = 0; at < text.size() && time(nullptr) < end;) {
            pollfd p = {in, POLLIN | POLLOUT, 0};
            poll(&p, 1, 200);
            char buf[4096];
            const ssize_t n = p.revents & POLLIN ? read(in, buf, sizeof buf) : 0;
            got.append(buf, size_t(std::max<ssize_t>(n, 0)));
            const ssize_t put = p.revents & POLLOUT ? write(in, &text[at], std::min<size_t>(text.size() - at, 500)) : 0;
            at += size_t(std::max<ssize_t>(put, 0));
        }
        fcntl(in, F_SETFL, 0);
        return got;
    }

    // Reads until `mark` has come after what earlier calls returned, or to the end, or for `seconds`.
    std::string read_until(const std::string &mark, int seconds = 60) {
        std::string got;
        const time_t end = time(nullptr) + seconds;
        const auto found = [&] { // at the end, as it comes byte by byte
            return got.size() >= mark.size() && got.compare(got.size() - mark.size(), mark.size(), mark) == 0;
        };
        while (!found() && time(nullptr) < end) {
            pollfd p = {out, POLLIN, 0};
            char buf[1];
            if (poll(&p, 1, 200) <= 0)
                continue;
            const ssize_t n = read(out, buf, 1);
            if (n <= 0)
                break;
            got.append(buf, size_t(n));
        }
        return got;
    }
    std::string rest() { return read_until("\x01never\x01", 60); }

    // The exit status, 128 + n after signal n; -1 when it does not end within `seconds`.
    int status(int seconds) {
        int status = 0;
        for (int i = 0; i < seconds * 100; i++) {
            if (waitpid(pid, &status, WNOHANG) == pid) {
                pid = -1;
                return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + 1000 + WTERMSIG(status);
            }
            usleep(10000);
        }
        return -1;
    }
};

// A chat on a terminal.
struct cli_chat {
    cli_child child;
    std::string greeting;

    explicit cli_chat(const std::vector<std::string> &options = {}, const cli_place &place = cli_terminal(),
                      const std::string &model = cli_model())
        : child(arguments(model, options), place), greeting(child.read_until("> ")) {}

    void type(const std::string &text) { child.type(text); }
    std::string until(const std::string &mark, int seconds = 60) { return child.read_until(mark, seconds); }
    // Types a line and returns what shows up to the next prompt.
    std::string say(const std::string &line) {
        type(line + "\n");
        return until("\n> ");
    }
    // Leaves, and returns the exit status.
    int leave(const std::string &how = "\x04") {
        type(how);
        last = child.rest();
        return child.status(10);
    }
    std::string last; // what showed meanwhile
    // Whether the program edits lines itself: else the terminal does, and there is no history.
    bool edits() const {
        termios t;
        return tcgetattr(child.out, &t) == 0 && !(t.c_lflag & ICANON);
    }
    void resize(int columns) {
        const winsize size = {24, (unsigned short)columns, 0, 0};
        EXPECT_EQ(ioctl(child.out, TIOCSWINSZ, &size), 0) << strerror(errno);
    }
    // The conversation as JSON.
    std::string exported() {
        const std::string path = cli_state() + "/export.json";
        say("/export " + path);
        return test::read_file(path);
    }

  private:
    static std::vector<std::string> arguments(const std::string &model, const std::vector<std::string> &options) {
        std::vector<std::string> args = {"chat", model};
        args.insert(args.end(), options.begin(), options.end());
        return args;
    }
};

// A text of about n tokens.
inline std::string cli_long_text(int n) {
    std::string s;
    for (int i = 0; i < n; i++)
        s += " dog";
    return s;
}

// A model that says a fixed chain of tokens: token i is followed by next[i]. Its only layer adds nothing (its weights
// are zero), each token has a direction of its own, and the output matrix turns that into the next token.
inline void cli_write_chain(const std::string &path, const std::vector<std::string> &tokens,
                            const std::vector<int> &next, const std::function<void(gguf_writer &)> &more = nullptr) {
    const size_t width = 32, n = tokens.size();
    std::vector<int32_t> types;
    std::vector<float> scores, one(width, 1.0f), embd(width * n), output(width * n);
    for (size_t i = 0; i < n; i++) {
        types.push_back(tokens[i].size() == 6 && tokens[i][0] == '<' ? 6 : i == 0 ? 2 : i < 3 ? 3 : 1);
        scores.push_back(-float(i));
        embd[i * width + i] = 1;
        output[size_t(next[i]) * width + i] = 1;
    }
    gguf_writer w;
    w.add_string("general.architecture", "llama");
    w.add_u32("llama.block_count", 1);
    w.add_u32("llama.context_length", 256);
    w.add_u32("llama.embedding_length", width);
    w.add_u32("llama.feed_forward_length", width);
    w.add_u32("llama.attention.head_count", 1);
    w.add_f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    w.add_string("tokenizer.ggml.model", "llama");
    w.add_strings("tokenizer.ggml.tokens", tokens);
    w.add_f32s("tokenizer.ggml.scores", scores);
    w.add_i32s("tokenizer.ggml.token_type", types);
    w.add_u32("tokenizer.ggml.unknown_token_id", 0);
    w.add_u32("tokenizer.ggml.bos_token_id", 1);
    w.add_u32("tokenizer.ggml.eos_token_id", 2);
    w.add_bool("tokenizer.ggml.add_bos_token", false);
    w.add_bool("tokenizer.ggml.add_space_prefix", false);
    if (more)
        more(w);
    w.add_floats("token_embd.weight", {width, n}, embd);
    w.add_floats("output.weight", {width, n}, output);
    w.add_floats("output_norm.weight", {width}, one);
    for (const char *name : {"attn_norm", "ffn_norm"})
        w.add_floats(std::string("blk.0.") + name + ".weight", {width}, one);
    for (const char *name : {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
        w.add_tensor(std::string("blk.0.") + name + ".weight", 0, {width, width});
    test::write_file(path, w.bytes());
}

#endif
