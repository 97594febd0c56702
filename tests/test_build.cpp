// What the build makes, seen from outside: the library's symbols, the binary's size and needs, the examples, the
// install, and the bits that other compilers give.
#include "util.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <thread>

namespace {

using test::command_result;
using test::root_path;
using test::shell;
using test::temp_dir;

const std::string model = root_path("models/tiny-chat-q8_0.gguf");

std::string build_dir() {
    const char *dir = getenv("ENGINE_BUILD");
    return root_path(dir && *dir ? dir : "build/release");
}
std::string in_build(const std::string &name) { return build_dir() + "/" + name; }

std::string quoted(const std::string &s) { return "'" + s + "'"; }

// Runs a shell line in the repository's root and expects it to succeed.
command_result build_do(const std::string &line, const std::string &input = "", int seconds = 900) {
    command_result r = shell("cd " + quoted(root_path("")) + " && " + line, input, seconds);
    EXPECT_EQ(r.code, 0) << line << "\n" << r.out << r.err;
    return r;
}

std::vector<std::string> words(const std::string &text) {
    std::istringstream in(text);
    std::vector<std::string> out;
    for (std::string word; in >> word;)
        out.push_back(word);
    return out;
}

TEST(Build, SharedLibraryExportsTheHeaderAndNothingElse) {
    std::set<std::string> declared, exported;
    const std::string header = test::read_file(root_path("engine.h"));
    for (size_t at = 0; (at = header.find("\nENGINE_API ", at)) != std::string::npos; at++) {
        size_t open = header.find('(', at), name = header.rfind("engine_", open);
        declared.insert(header.substr(name, open - name));
    }
    for (const std::string &name :
         words(build_do("nm -D --defined-only " + quoted(in_build("libengine.so")) + " | sed 's/.* //'").out))
        exported.insert(name);
    EXPECT_GT(declared.size(), 20u);
    EXPECT_EQ(exported, declared);
}

TEST(Build, StrippedBinaryIsUnderThreeMegabytes) {
    temp_dir dir;
    build_do("strip -o " + dir / "engine" + " " + quoted(in_build("engine")));
    struct stat st = {};
    ASSERT_EQ(stat((dir / "engine").c_str(), &st), 0);
    EXPECT_LT(st.st_size, 3000000);
}

TEST(Build, BinaryNeedsNothingButTheSystemsLibraries) {
    const std::string needed = build_do("readelf -d " + quoted(in_build("engine")) + " | grep NEEDED").out;
    for (const std::string &word : words(needed))
        if (word.find(".so") != std::string::npos) {
            bool system = word.find("[libc.so") == 0 || word.find("[libm.so") == 0 || word.find("[ld-linux") == 0;
            EXPECT_TRUE(system) << word;
        }
}

TEST(Build, HeaderIsCleanInOldAndNewLanguages) {
    temp_dir dir;
    test::write_file(dir / "a.c", "#include \"engine.h\"\nint main(void) { return engine_version() == 0; }\n");
    for (const char *language :
         {"gcc -x c -std=c99", "gcc -x c -std=c17", "g++ -x c++ -std=c++11", "g++ -x c++ -std=c++20"})
        build_do(std::string(language) + " -pedantic-errors -Wall -Wextra -Werror -I. -fsyntax-only " + dir / "a.c");
}

TEST(Build, FastMathIsRefused) {
    command_result r = shell("cd " + quoted(root_path("")) + " && g++ -std=c++17 -ffast-math -E engine.cpp >/dev/null");
    EXPECT_NE(r.code, 0);
    EXPECT_NE(r.err.find("-ffast-math"), std::string::npos) << r.err;
}

// The C example, compiled as strictly as C can be, gives the answer that the command gives.
TEST(Build, ExampleInCAnswersAsTheCommandDoes) {
    temp_dir dir;
    build_do("gcc -std=c99 -pedantic -Wall -Wextra -Werror -I. examples/answer.c " + quoted(in_build("libengine.a")) +
             " -lstdc++ -lm -pthread -o " + dir / "answer");
    const std::string prompt = "What is your name?";
    command_result example = test::run({dir / "answer", model, prompt});
    command_result command =
        test::run({in_build("engine"), "run", model, "-p", prompt, "--temp", "0", "-n", "256", "-q"});
    EXPECT_EQ(example.code, 0) << example.err;
    EXPECT_EQ(command.code, 0) << command.err;
    EXPECT_GT(example.out.size(), 1u);
    EXPECT_EQ(example.out, command.out);
    EXPECT_EQ(example.err, "");

    EXPECT_EQ(test::run({dir / "answer"}).code, 2);
    command_result bad = test::run({dir / "answer", dir / "none.gguf", prompt});
    EXPECT_EQ(bad.code, 1);
    EXPECT_NE(bad.err.find("none.gguf"), std::string::npos) << bad.err;
}

// The C++ example, compiled against an installed library through pkg-config.
TEST(Build, ExampleInCxxScoresLinesFromAnInstalledLibrary) {
    temp_dir dir;
    const std::string prefix = dir / "prefix",
                      config = std::string(getenv("ENGINE_BUILD") ? getenv("ENGINE_BUILD") : "");
    const std::string make = std::string("make --no-print-directory ") +
                             (config.find("-clang") != std::string::npos ? "CXX=clang++ " : "") + "PREFIX=" + prefix +
                             " ";
    unsetenv("MAKEFLAGS");
    build_do(make + "install");
    const std::string env = "PKG_CONFIG_PATH=" + prefix + "/lib/pkgconfig ";
    build_do("g++ -std=c++17 -Wall -Wextra -Werror examples/score.cpp $(" + env +
             "pkg-config --cflags --libs engine) -o " + dir / "score");
    command_result r = shell("LD_LIBRARY_PATH=" + prefix + "/lib " + dir / "score" + " " + quoted(model),
                             "Can you help me find a restaurant?\n\ngvx qpz jjw kkq zzxv wqx\n");
    EXPECT_EQ(r.code, 0) << r.err;
    std::vector<std::string> lines;
    std::istringstream in(r.out);
    for (std::string line; std::getline(in, line);)
        lines.push_back(line);
    ASSERT_EQ(lines.size(), 3u) << r.out;
    const double likely = atof(lines[0].c_str()), empty = atof(lines[1].c_str()), unlikely = atof(lines[2].c_str());
    EXPECT_LT(likely, 0);
    EXPECT_EQ(empty, 0);
    EXPECT_LT(unlikely, likely - 1);

    EXPECT_EQ(test::run({prefix + "/bin/engine", "run", model, "-p", "Hi", "-n", "4", "-q"}).code, 0);
    build_do("test -f " + prefix + "/share/doc/engine/LICENSE && " + make + "uninstall");
    EXPECT_EQ(shell("find " + prefix + " -type f -o -type l").out, "");
}

TEST(Build, MakeRunPutsTheAnswerAloneOnStdout) {
    // As a person calls it, not as a part of `make test`, where make names the folders that it enters.
    command_result r = shell("cd " + quoted(root_path("")) + " && env -u MAKEFLAGS -u MAKELEVEL make run",
                             "What is your name?\n", 900);
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_EQ(r.out.find("make"), std::string::npos) << r.out;
    EXPECT_EQ(r.out.find("g++"), std::string::npos) << r.out;
    EXPECT_GT(r.out.size(), 1u);
    EXPECT_EQ(r.out.back(), '\n');
}

// Promise 4 across compilers: with no flags but -O3 they give the logits that the Makefile's build gives, for float and
// for integer products. Both compilers work at once; each takes most of a minute.
TEST(Build, BareCompilersGiveTheSameBits) {
    temp_dir dir;
    std::vector<std::string> models = {model};
    for (const char *type : {"F16", "Q4_1", "Q4_K_M", "IQ4_XS"}) {
        models.push_back(dir / (std::string(type) + ".gguf"));
        build_do(quoted(in_build("make_model")) + " " + models.back() + " --embd 256 --ffn 512 --type " + type);
    }
    const char *const compilers[] = {"g++", "clang++"};
    const std::string standard[] = {"", " -std=c++17"}; // clang++ before 16 still takes C++14 for granted
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; i++)
        if (const char *cxx = compilers[i]; shell(std::string("command -v ") + cxx).code == 0)
            threads.emplace_back([&, i, cxx] {
                build_do(cxx + standard[i] + " -O3 tests/bits.cpp engine.cpp -pthread -o " + dir / cxx);
            });
    build_do("g++ -std=c++17 -O1 tests/bits.cpp " + quoted(in_build("libengine.a")) + " -pthread -o " + dir / "ours");
    for (std::thread &t : threads)
        t.join();
    for (const std::string &m : models) {
        command_result ours = test::run({dir / "ours", m});
        EXPECT_EQ(ours.code, 0) << ours.err;
        EXPECT_EQ(ours.out.size(), 17u) << ours.out;
        for (const char *cxx : compilers)
            if (test::exists(dir / cxx)) {
                EXPECT_EQ(test::run({dir / cxx, m}).out, ours.out) << cxx << " " << m;
            }
    }
}

} // namespace
