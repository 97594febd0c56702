// util.h: files, folders and commands for the tests. Nothing here knows the engine.
#ifndef UTIL_H
#define UTIL_H

#include <gtest/gtest.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace test {

inline bool exists(const std::string &path) {
    struct stat st;
    return stat(path.c_str(), &st) == 0;
}

// A path in the repository: root_path("tests/data/x").
inline std::string root_path(const std::string &name) {
    std::string here = __FILE__;
    size_t slash = here.rfind('/');
    return (slash == std::string::npos ? std::string("..") : here.substr(0, slash) + "/..") + "/" + name;
}

// A path in the folder of shared test data, which is not part of the repository; "" when it is absent.
inline std::string shared_path(const std::string &name) {
    const char *dir = getenv("ENGINE_TEST_DATA");
    std::string path = (dir && *dir ? std::string(dir) : root_path("../shared/data")) + "/" + name;
    return exists(path) ? path : "";
}

// Declares `var`, the path of a file of the shared test data, or skips the test. "[shared]" is the class of reason that
// tests/skips.txt knows.
#define NEED_SHARED(var, name)                                                                                         \
    const std::string var = test::shared_path(name);                                                                   \
    if (var.empty())                                                                                                   \
    GTEST_SKIP() << "[shared] no " << (name) << " in ../shared/data or $ENGINE_TEST_DATA"

// True when the long versions of tests are wanted (make test-long).
inline bool long_tests() {
    const char *v = getenv("ENGINE_TEST_LONG");
    return v && *v && strcmp(v, "0") != 0;
}

// All bytes of a file; the test fails, and "" comes back, when it cannot be read.
inline std::string read_file(const std::string &path) {
    std::string out;
    FILE *f = fopen(path.c_str(), "rb");
    if (!f) {
        ADD_FAILURE() << path << ": " << strerror(errno);
        return out;
    }
    char buf[65536];
    for (size_t n; (n = fread(buf, 1, sizeof buf, f)) > 0;)
        out.append(buf, n);
    fclose(f);
    return out;
}

inline void write_file(const std::string &path, const std::string &bytes) {
    FILE *f = fopen(path.c_str(), "wb");
    ASSERT_TRUE(f) << path << ": " << strerror(errno);
    EXPECT_EQ(fwrite(bytes.data(), 1, bytes.size(), f), bytes.size()) << path;
    EXPECT_EQ(fclose(f), 0) << path;
}

// A fresh folder, removed with its content at the end.
struct temp_dir {
    std::string path;
    temp_dir() {
        const char *base = getenv("TMPDIR");
        path = std::string(base && *base ? base : "/tmp") + "/engine-test-XXXXXX";
        if (!mkdtemp(&path[0])) {
            ADD_FAILURE() << path << ": " << strerror(errno);
            path.clear();
        }
    }
    ~temp_dir() {
        if (!path.empty() && system(("rm -rf '" + path + "'").c_str()) != 0)
            fprintf(stderr, "cannot remove %s\n", path.c_str());
    }
    temp_dir(const temp_dir &) = delete;
    std::string operator/(const std::string &name) const { return path + "/" + name; }
};

struct command_result {
    int code = -1; // exit status; 128 + n when signal n ended it
    std::string out, err;
};

// Runs argv (found through PATH), feeds it `input` and closes its stdin. The command is killed after `seconds`, which
// shows as code 137.
inline command_result run(const std::vector<std::string> &argv, const std::string &input = "", int seconds = 120) {
    command_result r;
    int in[2], out[2], err[2];
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) {
        ADD_FAILURE() << "pipe: " << strerror(errno);
        return r;
    }
    pid_t pid = fork();
    if (pid == 0) {
        dup2(in[0], 0), dup2(out[1], 1), dup2(err[1], 2);
        std::vector<char *> args;
        for (const std::string &a : argv)
            args.push_back(const_cast<char *>(a.c_str()));
        args.push_back(nullptr);
        execvp(args[0], args.data());
        fprintf(stderr, "%s: %s\n", args[0], strerror(errno));
        _exit(127);
    }
    close(in[0]), close(out[1]), close(err[1]);
    void (*old_pipe)(int) = signal(SIGPIPE, SIG_IGN);
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    size_t sent = 0;
    pollfd fds[3] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}, {in[1], POLLOUT, 0}};
    if (input.empty())
        close(in[1]), fds[2].fd = -1;
    timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    while (fds[0].fd >= 0 || fds[1].fd >= 0) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - start.tv_sec >= seconds) {
            ADD_FAILURE() << argv[0] << ": no end after " << seconds << " s";
            kill(pid, SIGKILL);
            break;
        }
        poll(fds, 3, 1000);
        for (int i = 0; i < 2; i++) {
            if (fds[i].fd < 0 || !fds[i].revents)
                continue;
            char buf[65536];
            ssize_t n = read(fds[i].fd, buf, sizeof buf);
            if (n > 0)
                (i ? r.err : r.out).append(buf, size_t(n));
            else
                close(fds[i].fd), fds[i].fd = -1;
        }
        if (fds[2].fd >= 0 && fds[2].revents) {
            ssize_t n = write(in[1], input.data() + sent, input.size() - sent);
            sent += n > 0 ? size_t(n) : 0;
            if (sent == input.size() || (n < 0 && errno != EAGAIN))
                close(in[1]), fds[2].fd = -1;
        }
    }
    for (const pollfd &p : fds)
        if (p.fd >= 0)
            close(p.fd);
    signal(SIGPIPE, old_pipe);
    int status = 0;
    waitpid(pid, &status, 0);
    r.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return r;
}

// A command line for the shell.
inline command_result shell(const std::string &line, const std::string &input = "", int seconds = 120) {
    return run({"/bin/sh", "-c", line}, input, seconds);
}

} // namespace test

#endif
