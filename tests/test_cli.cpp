// test_cli.cpp: the command of the engine: pipes, options, signals, and what each command prints. The chat has its own
// suite, test_chat.cpp.
#include "program.h"

#include <cmath>
#include <sstream>

namespace {

// ---- the pipe contract ----

TEST(Cli, AnswersWhatComesThroughAPipe) {
    const std::vector<std::string> args = {"-n", "8", "--temp", "0"};
    const command_result lf = cli_run("run", args, "What is your name?\n");
    EXPECT_EQ(lf.code, 0) << lf.err;
    EXPECT_TRUE(cli_one_line(lf.out)) << lf.out;
    EXPECT_FALSE(cli_has(lf.out, "What is your name?")) << "the prompt is echoed";
    EXPECT_FALSE(cli_has(lf.out + lf.err, "\x1b"));
    EXPECT_EQ(cli_run("run", args, "What is your name?").out, lf.out);
    EXPECT_EQ(cli_run("run", args, "What is your name?\r\n").out, lf.out);
    EXPECT_EQ(cli_run("chat", args, "What is your name?\n").out, lf.out) << "chat without a terminal";
    EXPECT_EQ(cli_run("run", {"-n", "8", "--temp", "0", "-p", "What is your name?"}).out, lf.out);
    EXPECT_EQ(cli_run("run", {"-n", "8", "--temp", "0", "-f", "-"}, "What is your name?\n").out, lf.out);
}

TEST(Cli, DropsExactlyOneNewlineOfStdin) {
    const auto prompt = [](const std::string &input) {
        return cli_numbers(cli_run("run", {"--raw", "--logits"}, input).out, "prompt_ids");
    };
    EXPECT_EQ(prompt("a b\n"), prompt("a b"));
    EXPECT_EQ(prompt("a b\n\n").size(), prompt("a b").size() + 1);
}

TEST(Cli, SaysThatThereIsNoPrompt) {
    for (const char *tail : {"< /dev/null", "<&-", "-p ''", "-p ' ' < /dev/null"}) {
        const command_result r = cli_shell(std::string("\"$E\" run \"$M\" ") + tail);
        EXPECT_EQ(r.code, 2) << tail;
        EXPECT_EQ(r.out, "") << tail;
        EXPECT_TRUE(cli_has(r.err, "no prompt")) << tail << ": " << r.err;
    }
    for (const char *blanks : {"", "\n", " \t\r\n\n  "}) {
        const command_result r = cli_run("run", {}, blanks);
        EXPECT_EQ(r.code, 2);
        EXPECT_TRUE(cli_has(r.err, "no prompt")) << r.err;
    }
    const command_result chat = cli_run("chat", {}, "");
    EXPECT_EQ(chat.code, 2) << "chat at the end of its input";
    EXPECT_TRUE(cli_has(chat.err, "no prompt") && !cli_has(chat.err, "-p"))
        << "an option that chat lacks: " << chat.err;
}

TEST(Cli, PutsTheArgumentBeforeStdin) {
    test::temp_dir dir;
    test::write_file(dir / "f", "the file\n");
    const auto prompt = [](std::vector<std::string> args, const std::string &input) {
        args.insert(args.end(), {"--raw", "--logits"});
        return cli_numbers(cli_run("run", args, input).out, "prompt_ids");
    };
    const auto plain = prompt({}, "Summarise:\n\nthe text");
    EXPECT_GT(plain.size(), 3u);
    EXPECT_EQ(prompt({"-p", "Summarise:"}, "the text\n"), plain);
    EXPECT_EQ(prompt({"-p", "Summarise:", "-f", dir / "f"}, "the text\n"),
              prompt({}, "Summarise:\n\nthe file\n\nthe text"));
    EXPECT_EQ(prompt({"-p", "Summarise:", "-f", "-"}, "the text\n"), plain) << "stdin is read once";
}

TEST(Cli, RefusesAPromptLongerThanTheContext) {
    const command_result r = cli_run("run", {"-c", "100"}, std::string(10000000, 'x'));
    EXPECT_EQ(r.code, 1);
    EXPECT_EQ(r.out, "");
    EXPECT_TRUE(cli_has(r.err, "exceeds the available context size")) << r.err;
    EXPECT_TRUE(cli_has(r.err, " 100 ")) << r.err;
    const size_t at = r.err.find("prompt has ");
    ASSERT_NE(at, std::string::npos) << r.err;
    EXPECT_GT(atoi(r.err.c_str() + at + 11), 100) << r.err;
}

TEST(Cli, StopsWhenTheContextIsFull) {
    const command_result ids = cli_run("run", {"--raw", "--logits"}, cli_long_text(30));
    const int n = int(cli_numbers(ids.out, "prompt_ids").size());
    const std::vector<std::string> args = {"-c", std::to_string(n + 4), "-n", "50", "--raw", "--ignore-eos"};
    const command_result r = cli_run("run", args, cli_long_text(30));
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_TRUE(cli_has(r.err, "context of " + std::to_string(n + 4) + " tokens is full")) << r.err;
    std::vector<std::string> json = args;
    json.push_back("--json");
    const command_result j = cli_run("run", json, cli_long_text(30));
    EXPECT_TRUE(cli_has(j.out, "\"finish_reason\":\"context\"")) << j.out;
    EXPECT_EQ(cli_numbers(j.out, "ids").size(), 4u);
}

TEST(Cli, TakesAnyBytes) {
    const std::string bytes("a\0b \xff\xfe \xf0\x9f end", 13);
    for (const char *mode : {"--temp=0", "--raw"}) {
        const command_result r = cli_run("run", {mode, "-n", "4"}, bytes);
        EXPECT_EQ(r.code, 0) << r.err;
    }
    // With --raw every byte reaches the tokenizer; in a chat a NUL becomes U+FFFD.
    const auto prompt = [](const std::string &mode, const std::string &input) {
        return cli_numbers(cli_run("run", {mode, "--logits"}, input).out, "prompt_ids");
    };
    // a, NUL, b, blank, ff, fe, blank, f0, 9f, " end" in this model's vocabulary
    EXPECT_EQ(prompt("--raw", bytes), (std::vector<double>{64, 188, 65, 220, 187, 186, 220, 172, 253, 1518}));
    EXPECT_EQ(prompt("--no-mmap", std::string("a\0b", 3)), prompt("--no-mmap", "a\xef\xbf\xbd"
                                                                               "b"));
    const command_result back = cli_run("tokenize", {"--decode"}, cli_run("tokenize", {}, std::string("a\0b", 3)).out);
    EXPECT_EQ(back.out, std::string("a\0b", 3));
}

TEST(Cli, EndsQuietlyWhenTheReaderHasGone) {
    for (const char *command :
         {"run \"$M\" -q -p 'Tell me a story' --ignore-eos -n 2000", "info \"$M\" --meta", "--help"}) {
        const command_result r =
            cli_shell(std::string("{ \"$E\" ") + command + " < /dev/null; echo \"code $?\" >&2; } | head -c 1");
        EXPECT_EQ(r.out.size(), 1u) << command;
        EXPECT_EQ(r.err, "code 0\n") << command;
    }
}

TEST(Cli, ReportsAFullDisk) {
    const command_result r = cli_shell("\"$E\" run \"$M\" -p Hello -n 4 < /dev/null > /dev/full");
    EXPECT_EQ(r.code, 1);
    EXPECT_TRUE(cli_has(r.err, "standard output")) << r.err;
    EXPECT_EQ(cli_shell("\"$E\" run \"$M\" -p Hello -n 4 < /dev/null >&-").code, 1) << "closed stdout";
    EXPECT_EQ(cli_shell("\"$E\" run \"$M\" -q -p Hello -n 4 < /dev/null 2>&-").code, 0) << "closed stderr";
}

TEST(Cli, KeepsStdoutAndStderrApart) {
    const command_result loud = cli_run("run", {"-p", "Hello", "-n", "8", "--temp", "0"});
    const command_result quiet = cli_run("run", {"-p", "Hello", "-n", "8", "--temp", "0", "-q"});
    EXPECT_EQ(loud.out, quiet.out);
    EXPECT_EQ(quiet.err, "");
    EXPECT_TRUE(cli_one_line(loud.err)) << loud.err;
    for (const char *part : {"prompt ", "reused", "TTFT", "prefill", "ITL p50", "decode", "GB/s"})
        EXPECT_TRUE(cli_has(loud.err, part)) << part << " in " << loud.err;
}

TEST(Cli, SaysMoreWithVerbose) {
    const std::vector<std::string> args = {"-p", "Hello", "-n", "8", "--temp", "0", "-c", "99", "-t", "1"};
    const command_result usual = cli_run("run", args);
    std::vector<std::string> more = args;
    more.push_back("-v");
    const command_result verbose = cli_run("run", more);
    EXPECT_EQ(verbose.out, usual.out);
    for (const char *fact : {"tiny-chat", "qwen3", "Q8_0", "cpu", "1 threads", "99 tokens", "chat template"}) {
        EXPECT_TRUE(cli_has(verbose.err, fact)) << fact << " in " << verbose.err;
        EXPECT_LT(verbose.err.find(fact), verbose.err.find("TTFT")) << fact << " comes before the work";
    }
    EXPECT_FALSE(cli_has(usual.err, "chat template"));
    more.push_back("-q");
    EXPECT_EQ(cli_run("run", more).err, "") << "the last one counts";
    EXPECT_TRUE(cli_has(cli_run("perplexity", {"-v"}, "Once upon a time").err, "context in use   512 tokens"));
}

TEST(Cli, HoldsBackHalfCharacters) {
    test::temp_dir dir;
    const std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "a", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"};
    cli_write_chain(dir / "whole.gguf", tokens, {2, 2, 2, 4, 5, 6, 7, 2}); // a, F0, 9F, A6, 99, end
    cli_write_chain(dir / "cut.gguf", tokens, {2, 2, 2, 4, 5, 2, 7, 2});   // a, F0, 9F, end
    const std::vector<std::string> args = {"--raw", "-p", "a", "--temp", "0", "-q"};
    const command_result whole = cli_run("run", args, "", dir / "whole.gguf");
    EXPECT_EQ(whole.code, 0) << whole.err;
    EXPECT_EQ(whole.out, "\xf0\x9f\xa6\x99\n");
    const command_result cut = cli_run("run", args, "", dir / "cut.gguf");
    EXPECT_EQ(cut.out, "\xef\xbf\xbd\n") << "what stays incomplete is one U+FFFD";
    std::vector<std::string> three = args;
    three.insert(three.end(), {"-n", "3"});
    EXPECT_EQ(cli_run("run", three, "", dir / "whole.gguf").out, "\xef\xbf\xbd\n");
    // The model has no template: that is said, and -s cannot be meant.
    const command_result plain = cli_run("run", {"-p", "a", "--temp", "0"}, "", dir / "whole.gguf");
    EXPECT_EQ(plain.out, whole.out);
    EXPECT_TRUE(cli_has(plain.err, "no chat template")) << plain.err;
    EXPECT_EQ(cli_run("run", {"-p", "a", "-s", "be nice"}, "", dir / "whole.gguf").code, 1);
    // Pieces that are no text of their own are lists of bytes.
    const command_result json = cli_run("tokenize", {"--json", "-p", "a\xf0\x9f\xa6\x99"}, "", dir / "whole.gguf");
    EXPECT_EQ(json.out, "{\"ids\":[3,4,5,6,7],\"pieces\":[\"a\",[240],[159],[166],[153]]}\n");
}

// ---- signals ----

TEST(Cli, StopsDecodingOnASignal) {
    for (int sig : {SIGINT, SIGTERM}) {
        cli_child child({"run", cli_model(), "-q", "-p", "Tell me a story", "--ignore-eos"});
        child.close_input();
        std::string text;
        char c;
        ASSERT_EQ(read(child.out, &c, 1), 1);
        kill(child.pid, sig);
        text = c + child.rest();
        EXPECT_EQ(child.status(5), 128 + sig);
        EXPECT_EQ(text.back(), '\n') << "what there is of the answer ends its line";
        EXPECT_GT(text.size(), 1u);
    }
}

TEST(Cli, StopsPrefillOnASignal) {
    cli_child child({"run", cli_model(), "-q", "--raw", "--chunk", "1", "-t", "1"});
    child.type(cli_long_text(1900)); // all in the pipe; the end is what starts the work
    child.close_input();
    usleep(100000);
    ASSERT_EQ(kill(child.pid, SIGINT), 0);
    EXPECT_EQ(child.rest(), "");
    EXPECT_EQ(child.status(5), 130);
}

TEST(Cli, SaysHowFarAnInterruptedPrefillCame) {
    cli_child child({"run", cli_model(), "--raw", "--chunk", "1", "-t", "1"},
                    cli_terminal()); // a terminal has stderr as well
    EXPECT_TRUE(cli_has(child.read_until("no prompt"), "no prompt"));
    const std::string text = "--prompt=" + cli_long_text(1900);
    cli_child prefill({"run", cli_model(), "--raw", "--chunk", "1", "-t", "1", text}, cli_terminal());
    // The terminal is stdin too, so that nothing more is read; -p alone starts the work.
    usleep(300000);
    kill(prefill.pid, SIGINT);
    const std::string got = prefill.rest();
    EXPECT_EQ(prefill.status(5), 130);
    EXPECT_FALSE(cli_has(got, "prefill 0.0")) << got;
    int done = 0, all = 0;
    const size_t at = got.find("prompt ");
    ASSERT_NE(at, std::string::npos) << got;
    ASSERT_EQ(sscanf(got.c_str() + at, "prompt %d of %d tokens", &done, &all), 2) << got;
    EXPECT_GT(all, 1800);
    EXPECT_LT(done, all);
    EXPECT_EQ(cli_has(got, "prefill"), done > 0) << got;
}

TEST(Cli, StopsPerplexityOnASignal) {
    test::temp_dir dir;
    test::write_file(dir / "text", cli_long_text(40000));
    cli_child child({"perplexity", cli_model(), "-f", dir / "text", "-c", "16", "-t", "1"}, cli_terminal());
    const std::string bar = child.read_until("perplexity [");
    ASSERT_TRUE(cli_has(bar, "perplexity [")) << bar;
    kill(child.pid, SIGINT);
    const std::string rest = child.rest();
    EXPECT_EQ(child.status(5), 130);
    EXPECT_TRUE(!rest.empty() && rest.back() == '\n') << "the bar's line is ended: " << rest;
}

TEST(Cli, StopsReadingOnASignal) {
    cli_child child({"run", cli_model(), "-q", "-p", "x"});
    usleep(200000); // stdin stays open and silent
    ASSERT_EQ(kill(child.pid, SIGINT), 0);
    EXPECT_EQ(child.status(5), 130);
}

TEST(Cli, LeavesAnIgnoredSignalIgnored) {
    cli_place place;
    place.ignore_interrupt = true;
    cli_child child({"run", cli_model(), "-q", "-p", "Tell me a story", "--ignore-eos", "-n", "60"}, place);
    child.close_input();
    char c;
    ASSERT_EQ(read(child.out, &c, 1), 1);
    kill(child.pid, SIGINT);
    child.rest();
    EXPECT_EQ(child.status(10), 0);
}

// ---- options ----

TEST(Cli, RefusesWrongUsage) {
    const std::string m = cli_model();
    const struct {
        std::vector<std::string> args;
        std::string says;
    } cases[] = {
        {{}, "engine COMMAND MODEL"},
        {{"rum", m}, "Did you mean run?"},
        {{"help", "tokenise"}, "Did you mean tokenize?"},
        {{"run"}, "no model"},
        {{"run", m, "--tmep", "1"}, "Did you mean --temp?"},
        {{"run", m, "-Z"}, "unknown option -Z"},
        {{"info", m, "--temp", "1"}, "--temp is no option of 'info'"},
        {{"run", m, "-n"}, "-n/--max-tokens needs a value"},
        {{"run", m, "-n", "12x"}, "'12x' is not a whole number from -1 to 2147483647"},
        {{"run", m, "-n", "-2"}, "'-2' is not a whole number"},
        {{"run", m, "-c", "-1"}, "'-1' is not a whole number from 0"},
        {{"run", m, "-n", "99999999999999999999"}, "is not a whole number"},
        {{"run", m, "-n", "2147483648"}, "is not a whole number"},
        {{"run", m, "-n", " 1"}, "is not a whole number"},
        {{"run", m, "-t", "513"}, "from 0 to 512"},
        {{"run", m, "--chunk", "4097"}, "from 0 to 4096"},
        {{"run", m, "--temp", "nan"}, "is not a number from 0 to 100"},
        {{"run", m, "--temp", "1e"}, "is not a number"},
        {{"run", m, "--top-p", "1.5"}, "is not a number from"},
        {{"run", m, "--min-p", "-0.1"}, "from 0 to 1"},
        {{"run", m, "--seed", "18446744073709551615"}, "or -1 for a random one"},
        {{"run", m, "--stop", ""}, "some text"},
        {{"run", m, "--session", "", "-p", "x"}, "--session: '' is not a file's name"},
        {{"run", m, "--kv", "f32", "-p", "x"}, "--kv: 'f32' is not one of f16|q8_0"},
        {{"run", m, "-c", "268435457", "-p", "x"}, "from 0 to 268435456"},
        {{"run", m, "--raw=1", "-p", "x"}, "takes no value"},
        {{"run", m, "two"}, "unexpected argument 'two' (the text is given with -p)"},
        {{"info", m, "two"}, "unexpected argument 'two'; see"},
        {{"run", m, "--temperature", "1"}, "Did you mean --temp?"},
        {{"run", m, "--ctx-size=100"}, "Did you mean --ctx?"},
        {{"chat", m, "--n-predict", "5"}, "Did you mean --max-tokens?"},
        {{"info", m, "--temperature", "1"}, "--temperature is no option of 'info'"},
        {{"run", m, "-ngl", "99"}, "-ngl: this build runs on the CPU only"},
        {{"bench", m, "-ngl99"}, "-ngl: this build runs on the CPU only"},
        {{"run", m, "--gpu-layers=9"}, "--gpu-layers: this build runs on the CPU only"},
        {{"info", m, "-v"}, "-v is no option of 'info'"},
        {{"tokenize", m, "--verbose"}, "--verbose is no option of 'tokenize'"},
        {{"help", "run", "chat"}, "unexpected argument 'chat'"},
        {{"run", m, "-m", m}, "two models"},
        {{"run", m, "--raw", "-s", "x", "-p", "y"}, "--raw"},
        {{"tokenize", m, "--decode", "--no-bos"}, "--no-bos"},
        {{"tokenize", m, "-p", "x", "-f", "y"}, "give one"},
        {{"perplexity", m, "-c", "1"}, "from 2"},
        {{"run", m, "--repeat-last-n", "0"}, "'0' is not a whole number from 1 to 2147483647, or -1 for all"},
        {{"run", m, "--dry-last-n", "-2"}, "or -1 for all"},
        {{"run", m, "--repeat-penalty", "101"}, "from 0 to 100"},
        {{"run", m, "--presence-penalty", "-101"}, "from -100 to 100"},
        {{"run", m, "--xtc-threshold", "0.6"}, "to 0.5"},
        {{"run", m, "--dry-base", "0"}, "from 1 to 100"},
        {{"run", m, "--typical", "0"}, "from 1e-06 to 1"},
        {{"run", m, "--logit-bias", "5"}, "ID+X, ID-X or ID=X"},
        {{"run", m, "--logit-bias", "x+1"}, "ID+X"},
        {{"run", m, "--logit-bias", "5+inf"}, "ID+X"},
        {{"run", m, "--logit-bias", "5=nan"}, "ID+X"},
        {{"run", m, "--logit-bias", "5+-1"}, "ID+X"},
        {{"run", m, "--think", "maybe"}, "'maybe' is not one of on|off"},
        {{"run", m, "--reasoning", ""}, "one of stderr|tagged|hide"},
        {{"run", m, "--template-arg", "x", "-p", "y"}, "'x' is not NAME=VALUE"},
        {{"run", m, "--messages", "x", "-p", "y"}, "cannot be used with -p"},
        {{"chat", m, "--messages", "x"}, "--messages is no option of 'chat'"},
        {{"info", m, "--session", "x"}, "--session is no option of 'info'"},
        {{"plan", m, "--temp", "1"}, "--temp is no option of 'plan'"},
        {{"plan", m, "-p", "0"}, "from 1"},
        {{"run", m, "--dry-sequence-breaker", "x"}, "Did you mean --dry-breaker?"},
        {{"bench", m, "-p", "0", "-n", "0"}, "nothing to measure"},
        {{"bench", m, "--depth", "1,,2"}, "commas between"},
    };
    for (const auto &c : cases) {
        std::vector<std::string> args = c.args;
        args.insert(args.begin(), cli_engine());
        const command_result r = test::run(args);
        EXPECT_EQ(r.code, 2) << c.says;
        EXPECT_EQ(r.out, "") << c.says;
        EXPECT_TRUE(cli_has(r.err, c.says)) << r.err << "does not say: " << c.says;
    }
}

TEST(Cli, UnderstandsEveryFormOfAnOption) {
    const std::string m = cli_model();
    const command_result usual = cli_run("run", {"-p", "Hello", "-n", "5", "--temp", "0", "-q"});
    EXPECT_EQ(usual.code, 0) << usual.err;
    for (const std::vector<std::string> &args : std::vector<std::vector<std::string>>{
             {"run", "-m", m, "-n5", "-qpHello", "--temp=0"},
             {"run", "--temp", "0", "--max-tokens=5", "--prompt=Hello", "-q", "--", m},
             {"run", "--model=" + m, "-n", "1", "-n", "5", "-p", "Hello", "-q", "--temp", "0e1"}}) {
        std::vector<std::string> argv = args;
        argv.insert(argv.begin(), cli_engine());
        const command_result r = test::run(argv);
        EXPECT_EQ(r.code, 0) << r.err;
        EXPECT_EQ(r.out, usual.out);
    }
}

TEST(Cli, HelpsOnStdout) {
    for (const char *line : {"\"$E\" --help", "\"$E\" help", "\"$E\" -h", "\"$E\" help run", "\"$E\" run --help",
                             "\"$E\" help help", "\"$E\" --help run", "\"$E\" help --help"}) {
        const command_result r = cli_shell(line);
        EXPECT_EQ(r.code, 0) << line;
        EXPECT_EQ(r.err, "") << line;
        EXPECT_TRUE(cli_has(r.out, "engine")) << line;
    }
    const command_result version = cli_shell("\"$E\" --version");
    EXPECT_EQ(version.code, 0);
    EXPECT_EQ(cli_shell("\"$E\" version").out, version.out);
    EXPECT_EQ(cli_shell("\"$E\" help help").out, cli_shell("\"$E\" help").out);
    EXPECT_EQ(version.out.compare(0, 7, "engine "), 0);
    EXPECT_TRUE(cli_one_line(version.out));
    EXPECT_TRUE(cli_has(cli_shell("\"$E\" help run").out, "--top-k N"));
    EXPECT_FALSE(cli_has(cli_shell("\"$E\" help info").out, "--top-k"));
}

TEST(Cli, NamesAMissingModel) {
    for (const char *command : {"run", "chat", "tokenize", "info", "perplexity", "bench", "plan"}) {
        const command_result r = cli_run(command, {}, "text", "/nowhere/x.gguf");
        EXPECT_EQ(r.code, 1) << command;
        EXPECT_EQ(r.out, "") << command;
        EXPECT_TRUE(cli_has(r.err, "/nowhere/x.gguf")) << r.err;
    }
    EXPECT_EQ(cli_run("run", {"-f", "/nowhere/text"}).code, 1);
}

// ---- sampling ----

TEST(Cli, RepeatsAnAnswerFromItsSeed) {
    const std::vector<std::string> args = {"-p", "Tell me a story", "-n", "24", "--temp", "1.2"};
    const auto with_seed = [&](const std::string &seed) {
        std::vector<std::string> all = args;
        all.insert(all.end(), {"--seed", seed});
        return cli_run("run", all);
    };
    const command_result first = cli_run("run", args);
    const size_t at = first.err.find("seed ");
    ASSERT_NE(at, std::string::npos) << first.err;
    const std::string seed = first.err.substr(at + 5, first.err.find_first_of(" \n", at + 5) - at - 5);
    EXPECT_EQ(with_seed(seed).out, first.out) << seed;
    int different = 0;
    for (const char *other : {"1", "2", "3", "18446744073709551614"})
        different += with_seed(other).out != first.out;
    EXPECT_GT(different, 0);
    EXPECT_FALSE(cli_has(cli_run("run", {"-p", "Hi", "-n", "2", "--temp", "0"}).err, "seed"));
    EXPECT_EQ(cli_run("run", {"-p", "Hi", "-n", "8", "--temp", "5", "--top-k", "1"}).out,
              cli_run("run", {"-p", "Hi", "-n", "8", "--temp", "0"}).out)
        << "one candidate is the greedy one";
}

TEST(Cli, TakesEverySamplingOption) {
    const auto ids = [](std::vector<std::string> args) {
        args.insert(args.end(), {"-p", "Tell me a story", "-n", "12", "--json", "-q"});
        const command_result r = cli_run("run", args);
        EXPECT_EQ(r.code, 0) << r.err;
        return cli_numbers(r.out, "ids");
    };
    const std::vector<double> greedy = ids({"--temp", "0"});
    ASSERT_EQ(greedy.size(), 12u);
    const std::string first = std::to_string(int(greedy[0])), second = std::to_string(int(greedy[1]));
    EXPECT_NE(ids({"--temp", "0", "--logit-bias", first + "=-inf"})[0], greedy[0]);
    EXPECT_NE(ids({"--temp", "0", "--logit-bias", first + "-100"})[0], greedy[0]);
    EXPECT_EQ(ids({"--temp", "0", "--logit-bias", second + "+100", "--ignore-eos"}),
              std::vector<double>(12, greedy[1]));
    EXPECT_EQ(ids({"--temp", "0", "--logit-bias", second + "=100", "--logit-bias", second + "-100"})[0], greedy[0])
        << "several biases add up";
    const command_result none = cli_run("run", {"-p", "x", "--logit-bias", "2048=1"});
    EXPECT_EQ(none.code, 1);
    EXPECT_TRUE(cli_has(none.err, "there is no token 2048")) << none.err;
    // Without a repetition, and with one that is forbidden.
    const std::vector<std::string> loop = {"--temp", "0", "--ignore-eos", "--logit-bias", second + "+30"};
    const auto with = [&](std::vector<std::string> more) {
        more.insert(more.end(), loop.begin(), loop.end());
        return ids(more);
    };
    const std::vector<double> repeated = with({});
    EXPECT_EQ(repeated, std::vector<double>(12, greedy[1]));
    EXPECT_NE(with({"--presence-penalty", "60"}), repeated);
    EXPECT_NE(with({"--frequency-penalty", "60"}), repeated);
    EXPECT_NE(with({"--repeat-penalty", "100"}), repeated);
    EXPECT_NE(with({"--frequency-penalty", "10", "--repeat-last-n", "-1"}),
              with({"--frequency-penalty", "10", "--repeat-last-n", "1"}));
    const std::vector<std::string> dry = {"--dry-multiplier", "50", "--dry-base", "2", "--dry-allowed-length", "2"};
    EXPECT_NE(with(dry), repeated);
    std::vector<std::string> broken = dry;
    std::string piece = cli_run("tokenize", {"--decode"}, second).out;
    broken.insert(broken.end(), {"--dry-breaker", piece, "--dry-last-n", "-1"});
    EXPECT_EQ(with(broken), repeated) << "no repetition reaches beyond " << piece;
    const std::vector<std::string> draw = {"--temp", "1",       "--seed", "3",       "--top-k",
                                           "0",      "--min-p", "0",      "--top-p", "1"};
    const auto drawn = [&](std::vector<std::string> more) {
        more.insert(more.end(), draw.begin(), draw.end());
        return ids(more);
    };
    EXPECT_NE(drawn({"--xtc-probability", "1", "--xtc-threshold", "0.01"}), drawn({}));
    EXPECT_EQ(drawn({"--typical", "1"}), drawn({}));
    EXPECT_NE(drawn({"--typical", "0.01"}), drawn({}));
}

TEST(Cli, TakesDefaultsFromTheModel) {
    test::temp_dir dir;
    const std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "a", "b"};
    cli_write_chain(dir / "m.gguf", tokens, {2, 2, 2, 4, 2},
                    [](gguf_writer &w) { w.add_f32("general.sampling.temp", 0); });
    EXPECT_FALSE(cli_has(cli_run("run", {"-p", "a"}, "", dir / "m.gguf").err, "seed"));
    EXPECT_TRUE(cli_has(cli_run("run", {"-p", "a", "--temp", "1"}, "", dir / "m.gguf").err, "seed"));
    cli_chat chat({}, cli_terminal(), dir / "m.gguf");
    EXPECT_TRUE(cli_has(chat.greeting, "as the model's file asks") && cli_has(chat.greeting, "temp 0,"))
        << chat.greeting;
    EXPECT_EQ(chat.leave(), 0);
}

// ---- templates and conversations ----

std::vector<double> cli_prompt(std::vector<std::string> args, const std::string &input = "",
                               const std::string &model = cli_model()) {
    args.insert(args.end(), {"--logits", "-q"});
    const command_result r = cli_run("run", args, input, model);
    EXPECT_EQ(r.code, 0) << r.err;
    return cli_numbers(r.out, "prompt_ids");
}

TEST(Cli, TakesAnotherTemplate) {
    test::temp_dir dir;
    test::write_file(dir / "t",
                     "{{ messages[0].content }}{% if x is defined %} x{{ x + x }}{% endif %}"
                     "{% if enable_thinking is defined %}{{ ' yes' if enable_thinking else ' no' }}{% endif %}");
    const std::string t = dir / "t";
    const auto raw = [](const std::string &text) { return cli_prompt({"--raw", "-p", text}); };
    EXPECT_EQ(cli_prompt({"-p", "one", "--template", t}), raw("one"));
    EXPECT_EQ(cli_prompt({"-p", "one", "--template", t, "--template-arg", "x=2"}), raw("one x4"));
    for (const char *x : {"x=a=b", "x=\"a=b\"", "x=  \"a\\u003db\""}) // JSON, or else the text itself
        EXPECT_EQ(cli_prompt({"-p", "one", "--template", t, "--template-arg", x}), raw("one xa=ba=b")) << x;
    for (const char *x : {"x=02", "x=2.", "x=tru", "x=[", "x=\"", "x=1 2"}) {
        const std::string value = x + 2;
        EXPECT_EQ(cli_prompt({"-p", "one", "--template", t, "--template-arg", x}), raw("one x" + value + value)) << x;
    }
    EXPECT_EQ(cli_prompt({"-p", "one", "--template", t, "--think", "on"}), raw("one yes"));
    EXPECT_EQ(cli_prompt({"-p", "one", "--template", t, "--think", "off"}), raw("one no"));
    EXPECT_EQ(cli_prompt({"-p", "one", "--template", t, "--template-arg", "enable_thinking=true"}), raw("one yes"));
    // No option is dropped without a word.
    const auto says = [](const std::vector<std::string> &args) {
        std::vector<std::string> all = args;
        all.insert(all.end(), {"-p", "x", "-n", "1"});
        return cli_run("run", all).err;
    };
    EXPECT_TRUE(cli_has(says({"--think", "on"}), "does not mention enable_thinking"));
    EXPECT_TRUE(cli_has(says({"--template-arg", "y=1"}), "does not mention y"));
    EXPECT_TRUE(cli_has(says({"--raw", "--think", "on"}), "no chat template is used"));
    EXPECT_EQ(cli_run("run", {"-p", "x", "--template", dir / "none"}).code, 1);
    test::write_file(dir / "bad", "{{ messages[0].content | nonsense }}");
    const command_result bad = cli_run("run", {"-p", "x", "--template", dir / "bad"});
    EXPECT_EQ(bad.code, 1);
    EXPECT_TRUE(cli_has(bad.err, "nonsense")) << bad.err;
    test::write_file(dir / "refuses", "{{ raise_exception('no such luck') }}");
    EXPECT_TRUE(cli_has(cli_run("run", {"-p", "x", "--template", dir / "refuses"}).err, "no such luck"));
    test::write_file(dir / "latin", "caf\xe9");
    EXPECT_TRUE(cli_has(cli_run("run", {"-p", "x", "--template", dir / "latin"}).err, "latin: byte 3 is no UTF-8"));
    test::write_file(dir / "mark", "\xef\xbb\xbf" + test::read_file(t));
    EXPECT_EQ(cli_prompt({"-p", "one", "--template", dir / "mark"}), raw("one"));
    test::write_file(dir / "nul", std::string("{{ 1 }}\0x", 9));
    EXPECT_TRUE(cli_has(cli_run("run", {"-p", "x", "--template", dir / "nul"}).err, "NUL"));
    // A model that has none of its own talks with the one that is given.
    cli_write_chain(dir / "m.gguf", {"<unk>", "<s>", "</s>", "a", "b", "c"}, {2, 2, 2, 4, 5, 2});
    test::write_file(dir / "b", "{{ messages[0].content }}b");
    const command_result given =
        cli_run("run", {"-p", "a", "--template", dir / "b", "--temp", "0"}, "", dir / "m.gguf");
    EXPECT_EQ(given.out, "c\n") << given.err;
    EXPECT_FALSE(cli_has(given.err, "no chat template")) << given.err;
}

TEST(Cli, TakesAConversation) {
    test::temp_dir dir;
    const std::string file = dir / "talk";
    test::write_file(
        file, "[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"H\\u00e9llo\"}]\n");
    const std::vector<double> ids = cli_prompt({"-s", "Be brief.", "-p", "H\xc3\xa9llo"});
    EXPECT_EQ(cli_prompt({"--messages", file}), ids);
    EXPECT_EQ(cli_prompt({"--messages", "-"}, test::read_file(file)), ids);
    EXPECT_EQ(cli_prompt({"--messages", "-"}, "\xef\xbb\xbf" + test::read_file(file)), ids) << "a byte order mark";
    const struct {
        std::string text;
        const char *says;
    } cases[] = {{"", "talk: line 1"},
                 {"{}", "array"},
                 {"[1]", "object"},
                 {"[{\"role\":\"user\"}", ""},
                 {" [ ] ", "talk: there is no message in it"},
                 {"[{\"role\":\"user\",\"content\":\"x\"},\n {\"role\" : \"user\", \"text\": {\"content\": 1}}]",
                  "talk: message 2 has no content"},
                 {"[{}]", "talk: message 1 has no role"},
                 {std::string("[\0]", 3), "NUL"}};
    for (const auto &c : cases) {
        test::write_file(file, c.text);
        const command_result r = cli_run("run", {"--messages", file});
        EXPECT_EQ(r.code, 1) << c.text;
        EXPECT_EQ(r.out, "");
        EXPECT_TRUE(cli_has(r.err, c.says)) << r.err;
    }
    // Beside a session that has a conversation of its own it would be unclear which one counts.
    test::write_file(file, "[{\"role\":\"user\",\"content\":\"Hello\"}]");
    EXPECT_EQ(cli_run("run", {"--messages", file, "-n", "1", "--session", dir / "cache"}).code, 0);
    const command_result again = cli_run("run", {"--messages", file, "-n", "1", "--session", dir / "cache"});
    EXPECT_TRUE(again.code == 0 && !cli_has(again.err, "(0 reused)")) << again.err;
    ASSERT_EQ(cli_run("run", {"-p", "Hi", "-n", "1", "--session", dir / "talked"}).code, 0);
    const command_result both = cli_run("run", {"--messages", file, "--session", dir / "talked"});
    EXPECT_EQ(both.code, 1);
    EXPECT_TRUE(cli_has(both.err, "holds a conversation of 2 messages")) << both.err;
}

TEST(Cli, KeepsReasoningApart) {
    test::temp_dir dir;
    const std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "a", "<think>", "b", "</think>", "c"};
    cli_write_chain(dir / "m.gguf", tokens, {2, 2, 2, 4, 5, 6, 7, 2},
                    [](gguf_writer &w) { w.add_string("tokenizer.chat_template", "{{ messages[-1].content }}"); });
    const auto run = [&](std::vector<std::string> more) {
        more.insert(more.end(), {"-p", "a", "--temp", "0"});
        return cli_run("run", more, "", dir / "m.gguf");
    };
    command_result r = run({});
    EXPECT_EQ(r.out, "c\n") << r.err;
    EXPECT_TRUE(cli_has(r.err, "<think>\nb\n</think>\n")) << r.err;
    EXPECT_TRUE(cli_has(r.err, "of them reasoning")) << r.err;
    r = run({"-q"});
    EXPECT_EQ(r.out + r.err, "c\n");
    r = run({"--reasoning", "tagged", "-q"});
    EXPECT_EQ(r.out, "<think>\nb\n</think>\nc\n") << r.err;
    r = run({"--reasoning", "hide"});
    EXPECT_EQ(r.out, "c\n");
    EXPECT_FALSE(cli_has(r.err, "<think>")) << r.err;
    r = run({"--reasoning", "tagged", "-q", "-n", "2"});
    EXPECT_EQ(r.out, "<think>\nb\n</think>\n\n") << "the mark is closed where the answer ends before it begins";
    r = run({"--json", "-q"});
    EXPECT_TRUE(cli_is_json(r.out) && cli_has(r.out, "{\"text\":\"c\",\"reasoning\":\"b\",")) << r.out;
    EXPECT_EQ(run({"--raw", "-q"}).out, "<think>b</think>c\n") << "raw is raw";
    cli_chat chat({"--temp", "0"}, cli_terminal(), dir / "m.gguf");
    EXPECT_TRUE(cli_has(chat.say("a"), "<think>\r\nb\r\n</think>\r\nc\r\n"));
    EXPECT_TRUE(cli_has(chat.exported(), "\"assistant\",\"content\":\"c\"")) << "it is no part of the conversation";
    chat.say("/set reasoning hide");
    EXPECT_FALSE(cli_has(chat.say("/regen"), "<think>"));
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Cli, StopsBeforeAStopString) {
    const std::string all = cli_run("run", {"-p", "What is your name?", "--temp", "0", "-q"}).out;
    ASSERT_GT(all.size(), 12u);
    const std::string stop = all.substr(6, 4);
    const command_result r =
        cli_run("run", {"-p", "What is your name?", "--temp", "0", "--stop", "no such text", "--stop", stop});
    EXPECT_EQ(r.out, all.substr(0, all.find(stop)) + "\n");
    EXPECT_TRUE(cli_has(r.err, "(stop_string)")) << r.err;
}

TEST(Cli, SaysWhyAnAnswerEnded) {
    const auto reason = [](std::vector<std::string> args) {
        args.insert(args.end(), {"-p", "What is your name?", "--temp", "0", "--json", "-q"});
        const std::string out = cli_run("run", args).out, key = "\"finish_reason\":\"";
        const size_t at = out.find(key);
        return at == std::string::npos ? out
                                       : out.substr(at + key.size(), out.find('"', at + key.size()) - at - key.size());
    };
    EXPECT_EQ(reason({}), "stop");
    EXPECT_EQ(reason({"-n", "-1"}), "stop") << "-1 is no limit";
    EXPECT_EQ(reason({"-n", "2"}), "length");
    EXPECT_EQ(reason({"--stop", "name"}), "stop_string");
    EXPECT_EQ(reason({"-c", "20", "--ignore-eos"}), "context");
    cli_child child({"run", cli_model(), "-p", "Hello", "--ignore-eos", "--json", "-q", "-t", "1"});
    child.close_input();
    usleep(150000);
    kill(child.pid, SIGINT);
    const std::string out = child.rest();
    EXPECT_EQ(child.status(5), 130);
    EXPECT_TRUE(out.empty() || cli_has(out, "\"finish_reason\":\"cancelled\"")) << out;
}

TEST(Cli, PrintsAnAnswerAsJson) {
    const std::vector<std::string> args = {"-p", "What is your name?", "--temp", "0", "-q"};
    std::string text = cli_run("run", args).out;
    text.pop_back();
    std::vector<std::string> json = args;
    json.push_back("--json");
    const command_result r = cli_run("run", json);
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_TRUE(cli_is_json(r.out)) << r.out;
    EXPECT_TRUE(cli_has(r.out, "{\"text\":\"" + text + "\"")) << r.out;
    EXPECT_TRUE(cli_has(r.out, "\"finish_reason\":\"stop\"")) << r.out;
    std::string ids;
    for (double id : cli_numbers(r.out, "ids"))
        ids += std::to_string(int(id)) + " ";
    EXPECT_EQ(cli_run("tokenize", {"--decode"}, ids).out, text);
}

TEST(Cli, PrintsLogitsThatAgreeWithTheGreedyToken) {
    const command_result r = cli_run("run", {"--raw", "--logits", "-p", "Once upon a time"});
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_TRUE(cli_is_json(r.out)) << r.out.substr(0, 200);
    const std::vector<double> logits = cli_numbers(r.out, "logits");
    EXPECT_TRUE(cli_has(r.out, "{\"n_vocab\":" + std::to_string(logits.size()) + ",")) << r.out.substr(0, 60);
    const command_result next = cli_run("run", {"--raw", "--json", "-n", "1", "--temp", "0", "-p", "Once upon a time"});
    const std::vector<double> ids = cli_numbers(next.out, "ids");
    ASSERT_EQ(ids.size(), 1u);
    EXPECT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(), ptrdiff_t(ids[0]));
    const command_result unused = cli_run("run", {"--raw", "--logits", "-p", "x", "-n", "3"});
    EXPECT_TRUE(cli_has(unused.err, "-n/--max-tokens has no effect")) << unused.err;
}

TEST(Cli, AnswersTheSameForAnyChunkAndThreads) {
    const std::string text = cli_long_text(40);
    const command_result usual = cli_run("run", {"--raw", "--logits"}, text);
    for (const std::vector<std::string> &more : std::vector<std::vector<std::string>>{
             {"--chunk", "1"}, {"--chunk", "7", "-t", "1"}, {"-t", "3"}, {"--no-mmap"}}) {
        std::vector<std::string> args = {"--raw", "--logits"};
        args.insert(args.end(), more.begin(), more.end());
        EXPECT_EQ(cli_run("run", args, text).out, usual.out) << more[0];
    }
}

// ---- the other commands ----

TEST(Cli, TokenizesThereAndBack) {
    for (const std::string &text : {std::string("Hello world"), std::string(" two  spaces\n\n\tand \xf0\x9f\xa6\x99\n"),
                                    std::string("<|im_end|> stays text"), std::string("a,1\r\n")}) {
        const command_result ids = cli_run("tokenize", {}, text);
        EXPECT_EQ(ids.code, 0) << ids.err;
        EXPECT_TRUE(cli_one_line(ids.out)) << ids.out;
        EXPECT_EQ(cli_run("tokenize", {"--decode"}, ids.out).out, text);
        EXPECT_EQ(cli_run("tokenize", {"-p", text}).out, ids.out);
        const command_result json = cli_run("tokenize", {"--json"}, text);
        EXPECT_TRUE(cli_is_json(json.out)) << json.out;
        std::string listed;
        for (double id : cli_numbers(json.out, "ids"))
            listed += (listed.empty() ? "" : " ") + std::to_string(int(id));
        EXPECT_EQ(listed + "\n", ids.out);
    }
    EXPECT_EQ(cli_run("tokenize", {}, "").out, "\n");
    EXPECT_EQ(cli_run("tokenize", {"--decode"}, "[1027, 919]").out,
              cli_run("tokenize", {"--decode"}, "1027,919\n").out);
    const command_result special = cli_run("tokenize", {"--special", "-p", "<|im_end|>"});
    EXPECT_EQ(special.out, "2047\n");
    EXPECT_EQ(cli_run("tokenize", {"--decode", "--special"}, special.out).out, "<|im_end|>");
    EXPECT_EQ(cli_run("tokenize", {"--decode"}, special.out).out, "");
    for (const char *wrong : {"1 x", "-1", "2048", "99999999999999999999", "1.5"}) {
        const command_result r = cli_run("tokenize", {"--decode"}, wrong);
        EXPECT_EQ(r.code, 1) << wrong;
        EXPECT_TRUE(cli_has(r.err, "from 0 to 2047")) << r.err;
    }
}

TEST(Cli, PrintsAModelsFacts) {
    const command_result text = cli_run("info", {}), json = cli_run("info", {"--json"}),
                         meta = cli_run("info", {"--json", "--meta"});
    EXPECT_EQ(text.code, 0) << text.err;
    for (const char *part : {"qwen3", "tiny-chat", "2048 tokens", "Q8_0", "per token"})
        EXPECT_TRUE(cli_has(text.out, part)) << part << " in " << text.out;
    EXPECT_TRUE(cli_is_json(json.out)) << json.out;
    EXPECT_TRUE(cli_has(json.out, "\"n_params\":3672576,")) << json.out;
    EXPECT_TRUE(cli_is_json(meta.out)) << meta.out;
    EXPECT_TRUE(cli_has(meta.out, "\"general.architecture\":\"qwen3\"")) << meta.out;
    EXPECT_TRUE(cli_has(cli_run("info", {"--meta"}).out, "qwen3.block_count = 4"));
    // Keys and values that look like each other.
    test::temp_dir dir;
    cli_write_chain(dir / "m.gguf", {"<unk>", "<s>", "</s>"}, {2, 2, 2}, [](gguf_writer &w) {
        w.add_string("k", "one\nk = two\ngeneral.architecture = x");
        w.add_string("k = k", "v = w");
        w.add_string("k = k = v", "w");
        w.add_string("l = m", "");
        for (int i = 0; i < 20000; i++)
            w.add_u32("many." + std::to_string(i), uint32_t(i));
    });
    const command_result odd = cli_run("info", {"--json", "--meta"}, "", dir / "m.gguf");
    EXPECT_TRUE(cli_is_json(odd.out)) << odd.out.substr(0, 2000);
    for (const char *part :
         {"\"k\":\"one\\nk = two\\ngeneral.architecture = x\"", "\"k = k\":\"v = w\"", "\"k = k = v\":\"w\"",
          "\"l = m\":\"\"", "\"general.architecture\":\"llama\"", "\"many.19999\":\"19999\""})
        EXPECT_TRUE(cli_has(odd.out, part)) << part;
}

TEST(Cli, PlansMemoryAndSpeed) {
    const auto value = [](const std::string &json, const std::string &key) {
        const size_t at = json.find("\"" + key + "\":");
        EXPECT_NE(at, std::string::npos) << key << " in " << json;
        return at == std::string::npos ? 0 : atof(json.c_str() + at + key.size() + 3);
    };
    const command_result plan = cli_run("plan", {"--json", "-c", "8192", "-p", "100", "-n", "7"});
    EXPECT_EQ(plan.code, 0) << plan.err;
    EXPECT_TRUE(cli_is_json(plan.out)) << plan.out;
    double sum = 0;
    for (const char *part :
         {"weight_bytes", "widened_bytes", "cache_bytes", "work_bytes", "scratch_bytes", "session_bytes"})
        sum += value(plan.out, part);
    EXPECT_EQ(value(plan.out, "needed_bytes"), sum);
    EXPECT_EQ(value(plan.out, "n_ctx"), 8192);
    EXPECT_EQ(value(plan.out, "cache_bytes"), 64 * value(plan.out, "page_bytes"));
    EXPECT_EQ(value(plan.out, "weight_bytes"), value(cli_run("info", {"--json"}).out, "weight_bytes"));
    // One row per doubling of the context, each with more cache and a lower bound of speed.
    double rows = 0, cache = 0, rate = HUGE_VAL;
    for (size_t at = plan.out.find("\"contexts\""); (at = plan.out.find("{\"n_ctx\"", at)) != std::string::npos; at++) {
        const std::string row = plan.out.substr(at, plan.out.find('}', at) - at);
        EXPECT_EQ(value(row, "n_ctx"), 2048 << int(rows++)) << row;
        EXPECT_GT(value(row, "cache_bytes"), cache) << row;
        EXPECT_LT(value(row, "decode_tok_s"), rate) << row;
        cache = value(row, "cache_bytes"), rate = value(row, "decode_tok_s");
    }
    EXPECT_EQ(rows, 3);
    const double bandwidth = value(plan.out, "bandwidth_gb_s") * 1e9;
    EXPECT_NEAR(rate, bandwidth / (value(plan.out, "decode_bytes") + value(plan.out, "decode_kv_bytes")), rate * 1e-6);
    EXPECT_GT(value(plan.out, "int8_macs_s"), 0);
    EXPECT_EQ(value(plan.out, "prompt_tokens"), 100);
    EXPECT_EQ(value(plan.out, "answer_tokens"), 7);
    EXPECT_NEAR(value(plan.out, "prefill_tok_s") * value(plan.out, "prefill_s"), 100, 1e-3);
    EXPECT_TRUE(cli_has(plan.out, value(plan.out, "prefill_s") > value(plan.out, "decode_s")
                                      ? "\"bottleneck\":\"prefill\""
                                      : "\"bottleneck\":\"decode\""));
    const command_result text = cli_run("plan", {"--kv", "q8_0"});
    EXPECT_EQ(text.code, 0) << text.err;
    EXPECT_EQ(text.err, "");
    for (const char *part : {"q8_0", "per token", "scratch", "largest context", "2048 ", "GB/s", "512 tokens",
                             "an answer of 256", "will be the bottleneck"})
        EXPECT_TRUE(cli_has(text.out, part)) << part << " in " << text.out;
    EXPECT_TRUE(cli_has(plan.err, "8192 is more than the 2048 that the model was trained for"));
    const command_result wrong = cli_run("plan", {"--kv", "q9"});
    EXPECT_EQ(wrong.code, 2);
    EXPECT_TRUE(cli_has(wrong.err, "q9")) << wrong.err;
    EXPECT_EQ(cli_run("run", {"-p", "x", "--kv", "q9"}).code, 2);
    EXPECT_EQ(cli_run("run", {"-p", "x", "-n", "4", "--kv", "q8_0"}).code, 0);
}

// The mean over a window is the mean of what single prompts give.
TEST(Cli, MeasuresPerplexity) {
    double sum = 0;
    std::string prefix;
    std::vector<double> ids = cli_numbers(cli_run("tokenize", {"--json", "-p", "Once upon a time"}).out, "ids");
    for (size_t i = 0; i + 1 < ids.size(); i++) {
        prefix = "";
        for (size_t k = 0; k <= i; k++)
            prefix += std::to_string(int(ids[k])) + " ";
        prefix = cli_run("tokenize", {"--decode"}, prefix).out;
        const command_result r = cli_run("run", {"--raw", "--logits", "-p", prefix});
        ASSERT_EQ(cli_numbers(r.out, "prompt_ids").size(), i + 1) << prefix;
        const std::vector<double> logits = cli_numbers(r.out, "logits");
        double total = 0;
        for (double l : logits)
            total += std::exp(l);
        sum += std::log(total) - logits[size_t(ids[i + 1])];
    }
    const command_result r = cli_run("perplexity", {"--json", "-q"}, "Once upon a time");
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_TRUE(cli_is_json(r.out)) << r.out;
    const double mean = sum / double(ids.size() - 1);
    const size_t at = r.out.find("\"mean_nll\":");
    ASSERT_NE(at, std::string::npos) << r.out;
    EXPECT_NEAR(atof(r.out.c_str() + at + 11), mean, 1e-6);

    // Windows start anew: the same text twice, cut between, has the same mean.
    const std::string n = std::to_string(ids.size());
    const command_result twice = cli_run("perplexity", {"--json", "-c", n}, "Once upon a timeOnce upon a time");
    EXPECT_TRUE(cli_has(twice.out, "\"windows\":2,\"scored\":" + std::to_string(2 * (ids.size() - 1)) + ","))
        << twice.out;
    EXPECT_EQ(twice.out.substr(twice.out.find("\"mean_nll\"")), r.out.substr(at));
    EXPECT_TRUE(cli_has(cli_run("perplexity", {}, "Once upon a time").out, "perplexity"));
    EXPECT_EQ(cli_run("perplexity", {}, "").code, 1) << "nothing to score";
}

TEST(Cli, MeasuresSpeed) {
    const std::vector<std::string> args = {"-p", "4", "-n", "3", "-r", "1", "--depth", "0,5"};
    const auto with = [&](const char *form) {
        std::vector<std::string> all = args;
        all.push_back(form);
        return cli_run("bench", all);
    };
    const command_result json = with("--json"), text = with("-q");
    EXPECT_EQ(json.code, 0) << json.err;
    EXPECT_TRUE(cli_is_json(json.out)) << json.out;
    for (const char *part :
         {"\"test\":\"prefill\",\"depth\":0,\"tokens\":4,", "\"test\":\"decode\",\"depth\":5,\"tokens\":3,",
          "\"bandwidth_gb_s\":", "\"generic_ops\":"})
        EXPECT_TRUE(cli_has(json.out, part)) << part << " in " << json.out;
    const auto value = [](const std::string &object, const std::string &key) {
        const size_t at = object.find("\"" + key + "\":");
        EXPECT_NE(at, std::string::npos) << key << " in " << object;
        return at == std::string::npos ? 0 : atof(object.c_str() + at + key.size() + 3); // null reads as 0
    };
    const double bandwidth = value(json.out, "bandwidth_gb_s");
    EXPECT_GT(bandwidth, 0);
    int rows = 0;
    for (size_t at = 0; (at = json.out.find("{\"test\"", at)) != std::string::npos; at++, rows++) {
        const std::string row = json.out.substr(at, json.out.find('}', at) - at);
        const double rate = value(row, "tok_s");
        EXPECT_GT(rate, 0) << row;
        EXPECT_EQ(value(row, "min_tok_s"), rate) << "one repetition: " << row;
        EXPECT_EQ(value(row, "max_tok_s"), rate) << row;
        if (cli_has(row, "prefill")) {
            EXPECT_TRUE(cli_has(row, "\"bytes_per_token\":null,\"gb_s\":null,\"bandwidth_share\":null")) << row;
            continue;
        }
        // The weights are read once per token: all but the table of embeddings, of which it takes a row.
        const double bytes = value(row, "bytes_per_token"), speed = value(row, "gb_s");
        EXPECT_GE(bytes, value(cli_run("info", {"--json"}).out, "decode_bytes")) << row;
        EXPECT_NEAR(speed, bytes * rate * 1e-9, 1e-6 * speed) << row;
        EXPECT_NEAR(value(row, "bandwidth_share"), speed / bandwidth, 1e-6 * speed / bandwidth) << row;
    }
    EXPECT_EQ(rows, 4);
    // The verdicts say the same as the rows.
    const size_t second = json.out.find("{\"depth\":5,\"ttft_s\"");
    ASSERT_NE(second, std::string::npos) << json.out;
    const std::string verdict = json.out.substr(second);
    EXPECT_GT(value(verdict, "ttft_s"), 0);
    EXPECT_GE(value(verdict, "itl_p99_s"), value(verdict, "itl_p50_s"));
    EXPECT_GT(value(verdict, "int8_share"), 0);
    EXPECT_GT(value(verdict, "bandwidth_share"), 0);
    EXPECT_TRUE(cli_has(verdict, "\"bound\":\"decode\"") || cli_has(verdict, "\"bound\":\"prefill\"")) << verdict;
    EXPECT_TRUE(cli_has(verdict, "4 prompt tokens take") && cli_has(verdict, "3 answer tokens")) << verdict;
    std::istringstream lines(text.out);
    for (std::string line; std::getline(lines, line);)
        EXPECT_LE(line.size(), 100u) << line;
    EXPECT_FALSE(cli_has(cli_run("bench", {"-p", "4", "-n", "0", "-r", "1"}).out, "GB/s  of"))
        << "columns that only decode rows fill";
    for (const char *part : {"memory bandwidth", "generic path", "threads", "prefill", "decode", "TTFT", "ITL p50",
                             "int8 peak", "-bound: 4 prompt tokens take"})
        EXPECT_TRUE(cli_has(text.out, part)) << part << " in " << text.out;
}

} // namespace
