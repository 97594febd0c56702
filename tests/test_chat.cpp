// test_chat.cpp: the chat on a real terminal (a pty), and the sessions that run and chat keep in files.
#include "program.h"

#include <dlfcn.h>
#include <random>
#include <sys/mount.h>

#include "../engine.h"

namespace {

using test::command_result;

double chat_seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

std::string chat_message(const std::string &role, const std::string &content) {
    return "{\"role\":\"" + role + "\",\"content\":\"" + content + "\"}";
}

// An escape that changes colours or the like: ESC [ numbers m
bool chat_has_colour(const std::string &s) {
    for (size_t at = 0; (at = s.find("\x1b[", at)) != std::string::npos; at += 2) {
        const size_t end = s.find_first_not_of("0123456789;:", at + 2);
        if (end != std::string::npos && s[end] == 'm')
            return true;
    }
    return false;
}

int chat_count(const std::string &text, const std::string &part) {
    int n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size())
        n++;
    return n;
}

// ---- the commands ----

TEST(Chat, TalksOnATerminal) {
    cli_chat chat({"--temp", "0"});
    for (const char *part : {"tiny-chat", "2048 tokens (as the model was trained)", "/help"})
        EXPECT_TRUE(cli_has(chat.greeting, part)) << part << " in " << chat.greeting;
    std::string got = chat.say("What is your name?");
    EXPECT_TRUE(cli_has(got, "My name is tiny-chat")) << got;
    EXPECT_TRUE(cli_has(got, "(0 reused)")) << got;
    got = chat.say("Hello");
    EXPECT_TRUE(cli_has(got, "reused)") && !cli_has(got, "(0 reused)")) << "the conversation goes on: " << got;
    EXPECT_TRUE(cli_has(chat.say("/regen"), "(stop)"));
    got = chat.say("/stats");
    EXPECT_TRUE(cli_has(got, "4 messages") && cli_has(got, " of 2048 tokens") && cli_has(got, "MiB")) << got;
    EXPECT_TRUE(cli_has(chat.say("/system Be brief."), "system message set"));
    EXPECT_TRUE(cli_has(chat.say("/system"), "\nBe brief."));
    EXPECT_TRUE(cli_has(chat.exported(), "[\n" + chat_message("system", "Be brief.") + ",\n"));
    EXPECT_TRUE(cli_has(chat.say("/system -"), "removed"));
    EXPECT_TRUE(cli_has(chat.say("/clear"), "cleared"));
    EXPECT_TRUE(cli_has(chat.say("/hlep"), "Did you mean /help?"));
    EXPECT_TRUE(cli_has(chat.say("/clear now"), "/clear takes no argument"));
    EXPECT_TRUE(cli_has(chat.say("/exit now"), "/exit takes no argument"));
    EXPECT_TRUE(cli_has(chat.say("/save"), "/save needs an argument"));
    EXPECT_TRUE(cli_has(chat.say("/regen"), "nothing to answer"));
    EXPECT_TRUE(cli_has(chat.say("/undo"), "no message to take back"));
    got = chat.say("  /help");
    for (const char *part : {"/regen", "/undo", "/compact", "/set", "/save FILE", "/load FILE", "/read FILE", "\"\"\""})
        EXPECT_TRUE(cli_has(got, part)) << part << " in " << got;
    chat.type("\"\"\"one\ntwo\"\"\"\n");
    EXPECT_TRUE(cli_has(chat.until("tok/s"), "tok/s")) << "a block is one message";
    chat.until("\n> ");
    EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "one\\ntwo")));
    EXPECT_EQ(chat.leave("/bye\n"), 0);
}

TEST(Chat, LeavesWithCtrlD) {
    cli_chat chat({"-q"}, cli_terminal({"TERM=dumb"}));
    EXPECT_EQ(chat.greeting, "> ") << "-q";
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Chat, TakesBackAndAnswersAgain) {
    cli_chat chat({"--temp", "2", "--seed", "7", "-n", "20"});
    EXPECT_TRUE(cli_has(chat.say("What is your name?"), "| seed 7"));
    const std::string first = chat.exported();
    std::string got = chat.say("Tell me a story");
    const std::string second = chat.exported();
    got = chat.say("/undo");
    EXPECT_TRUE(cli_has(got, "taken back: user: Tell me a story (15 bytes)")) << got;
    EXPECT_TRUE(cli_has(got, "taken back: assistant: ")) << got;
    EXPECT_EQ(chat.exported(), first);
    got = chat.say("Tell me a story");
    EXPECT_EQ(chat.exported(), second) << "the same seed at the same place";
    got = chat.say("/regen");
    EXPECT_TRUE(cli_has(got, "| seed 8")) << got;
    EXPECT_NE(chat.exported(), second);
    // All of the prompt but its last token is there already.
    int prompt = 0, reused = 0;
    const size_t at = got.find("prompt ");
    ASSERT_NE(at, std::string::npos) << got;
    ASSERT_EQ(sscanf(got.c_str() + at, "prompt %d tokens (%d reused)", &prompt, &reused), 2) << got;
    EXPECT_EQ(reused, prompt - 1);
    chat.say("/set seed 7");
    chat.say("/undo");
    chat.say("Tell me a story");
    EXPECT_EQ(chat.exported(), second);
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Chat, ChangesSettings) {
    cli_chat chat({"--temp", "0.5", "--stop", "one"});
    std::string got = chat.say("/set");
    for (const char *part : {"temp               0.5", "top-k              40", "stop               \"one\"",
                             "reasoning          stderr", "ignore-eos         off", "dry-base           1.75",
                             "repeat-last-n      64", "dry-breaker        default: newline : \" *"})
        EXPECT_TRUE(cli_has(got, part)) << part << " in " << got;
    EXPECT_TRUE(cli_has(chat.say("/set temp 0"), "temp is 0"));
    EXPECT_TRUE(cli_has(chat.say("/set max-tokens 2"), "max-tokens is 2"));
    EXPECT_TRUE(cli_has(chat.say("Hello"), "answer 2 tokens (length)"));
    EXPECT_TRUE(cli_has(chat.say("/set stop two"), "stop is \"one\" \"two\""));
    EXPECT_TRUE(cli_has(chat.say("/set stop default"), "stop is none"));
    EXPECT_TRUE(cli_has(chat.say("/set logit-bias 5-inf"), "logit-bias is 5=-inf"));
    EXPECT_TRUE(cli_has(chat.say("/set logit-bias 2048+1"), "there is no token 2048"));
    EXPECT_TRUE(cli_has(chat.say("/set logit-bias"), "5=-inf\r\n")) << "what was refused has changed nothing";
    EXPECT_TRUE(cli_has(chat.say("/set ignore-eos on"), "ignore-eos is on"));
    EXPECT_TRUE(cli_has(chat.say("/set ignore-eos off"), "ignore-eos is off"));
    EXPECT_TRUE(cli_has(chat.say("/set ignore-eos 1"), "is not on or off"));
    EXPECT_TRUE(cli_has(chat.say("/set temp -1"), "'-1' is not a number from 0"));
    EXPECT_TRUE(cli_has(chat.say("/set tmep 1"), "Did you mean temp?"));
    EXPECT_TRUE(cli_has(chat.say("/set ctx 1"), "no setting 'ctx'"));
    EXPECT_TRUE(cli_has(chat.say("/set reasoning loud"), "one of stderr|tagged|hide"));
    EXPECT_TRUE(cli_has(chat.say("/set temp default"), "temp is 0.8"));
    got = chat.say("/think on");
    EXPECT_TRUE(cli_has(got, "the chat template does not mention enable_thinking") && cli_has(got, "think is on"))
        << got;
    EXPECT_TRUE(cli_has(chat.say("/think maybe"), "one of on|off"));
    EXPECT_TRUE(cli_has(chat.say("/think"), "think              on"));
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Chat, ReadsAndExportsFiles) {
    test::temp_dir dir;
    test::write_file(dir / "text", "\xef\xbb\xbfOnce \"upon\" a\ttime\n\xc3\xa9\n");
    test::write_file(dir / "blank", " \n");
    test::write_file(dir / "old", "[]\n"); // what this program exports of nothing
    ASSERT_EQ(symlink("old", (dir / "link").c_str()), 0);
    cli_chat chat({"-n", "3"});
    EXPECT_TRUE(cli_has(chat.say("/read " + dir / "none"), "No such file"));
    EXPECT_TRUE(cli_has(chat.say("/read " + dir.path), "Is a directory"));
    EXPECT_TRUE(cli_has(chat.say("/read " + dir / "blank"), "has no text"));
    test::write_file(dir / "latin", "caf\xe9\n");
    EXPECT_TRUE(cli_has(chat.say("/read " + dir / "latin"), "latin: byte 3 is no UTF-8"));
    EXPECT_TRUE(cli_has(chat.say("/read " + dir / "text"), "| answer"));
    EXPECT_TRUE(cli_has(chat.say("/export " + dir / "no/such"), "No such file"));
    EXPECT_TRUE(cli_has(chat.say("/export " + dir / "link"), "2 messages written"));
    EXPECT_TRUE(cli_has(chat.say("/export " + dir / "old"), "2 messages written")) << "again";
    const std::string json = test::read_file(dir / "old");
    EXPECT_TRUE(cli_is_json(json)) << json;
    EXPECT_TRUE(cli_has(json, chat_message("user", "Once \\\"upon\\\" a\\ttime\\n\xc3\xa9"))) << json;
    struct stat st = {};
    EXPECT_EQ(stat((dir / "old").c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 0777, 0600u);
    EXPECT_EQ(lstat((dir / "link").c_str(), &st), 0);
    EXPECT_TRUE(S_ISLNK(st.st_mode));
    EXPECT_TRUE(cli_has(chat.say("/export /dev/null"), "2 messages written"));
    EXPECT_EQ(stat("/dev/null", &st), 0);
    EXPECT_TRUE(S_ISCHR(st.st_mode)) << "a device is written to, not replaced";
    // A pipe that no one writes to: Ctrl-C goes back to the prompt.
    ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
    EXPECT_TRUE(cli_has(chat.say("/save " + dir / "pipe"), "is not a file"));
    EXPECT_TRUE(cli_has(chat.say("/load " + dir / "pipe"), "is not a file"));
    chat.type("/read " + dir / "pipe" + "\n");
    chat.until("pipe");
    usleep(200000);
    chat.type("\x03");
    EXPECT_TRUE(cli_has(chat.until("\n> ", 10), "Interrupted"));
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Chat, OverwritesOnlyFilesOfItsOwn) {
    test::temp_dir dir;
    test::write_file(dir / "notes", "years of work\n");
    test::write_file(dir / "data.json", "[1, 2, 3]\n");
    test::write_file(dir / "empty", "");
    ASSERT_EQ(symlink("notes", (dir / "link").c_str()), 0);
    ASSERT_EQ(symlink("nothing", (dir / "loose").c_str()), 0);
    cli_chat chat({"-n", "2"}, cli_terminal({"HOME=" + dir.path}));
    for (const char *command : {"/save ", "/export "}) {
        for (const char *name : {"notes", "data.json", "link"})
            EXPECT_TRUE(cli_has(chat.say(command + dir / name), dir / name + ": is there already and is no "));
        EXPECT_TRUE(cli_has(chat.say(command + dir / "loose"), "a link that leads nowhere"));
    }
    EXPECT_TRUE(cli_has(chat.say("/save " + dir / "empty"), "saved to"));
    EXPECT_TRUE(cli_has(chat.say("/save ~/empty"), "saved to " + dir / "empty"));
    EXPECT_TRUE(cli_has(chat.say("/export ~/empty"), "is no exported conversation"));
    EXPECT_TRUE(cli_has(chat.say("/save ~/no/such"), dir / "no/such: cannot be created: No such file"));
    EXPECT_TRUE(cli_has(chat.say("/read ~/notes"), "| answer"));
    EXPECT_EQ(chat.leave(), 0);
    EXPECT_EQ(test::read_file(dir / "notes"), "years of work\n");
    EXPECT_EQ(test::read_file(dir / "data.json"), "[1, 2, 3]\n");
    EXPECT_EQ(test::shell("ls '" + dir.path + "'").out, "data.json\nempty\nlink\nloose\nnotes\n");
}

// ---- a full context ----

TEST(Chat, StaysAliveWhenItsContextIsFull) {
    cli_chat chat({"-c", "40", "--ignore-eos"});
    EXPECT_TRUE(cli_has(chat.greeting, "40 tokens (of 2048 that the model was trained for)")) << chat.greeting;
    std::string got = chat.say(cli_long_text(60));
    for (const char *part : {"not answered", "context of 40", "/clear", "-c"})
        EXPECT_TRUE(cli_has(got, part)) << part << " in " << got;
    EXPECT_FALSE(cli_has(got, "/compact")) << "there is nothing to drop: " << got;
    int tokens = 0;
    ASSERT_EQ(
        sscanf(got.c_str() + got.find("not answered"), "not answered: with this message the prompt has %d", &tokens),
        1);
    EXPECT_GT(tokens, 40);
    got = chat.say("Hi");
    for (const char *part : {"context of 40 tokens is full", "/clear", "-c", "(context)"})
        EXPECT_TRUE(cli_has(got, part)) << part << " in " << got;
    for (int i = 0; i < 3; i++) { // it stays full
        got = chat.say("Hi");
        EXPECT_TRUE(cli_has(got, "not answered") && cli_has(got, "/compact") && !cli_has(got, "| answer")) << got;
    }
    EXPECT_TRUE(cli_has(chat.say("/stats"), "2 messages"));
    got = chat.say("/compact");
    EXPECT_TRUE(cli_has(got, "dropped user: Hi (2 bytes)") && cli_has(got, "dropped assistant: ")) << got;
    EXPECT_TRUE(cli_has(got, "dropped the oldest 1 of 1 turn; 0 messages left, 0 of 40 tokens")) << got;
    EXPECT_TRUE(cli_has(chat.say("Hi"), "| answer"));
    chat.say("/clear");
    EXPECT_TRUE(cli_has(chat.say("Hi"), "| answer"));
    EXPECT_EQ(chat.leave("/exit\n"), 0);
}

TEST(Chat, CompactsWhatItSays) {
    cli_chat chat({"-c", "200", "-n", "4", "--temp", "0", "-s", "Be brief."});
    for (const char *text : {"one", "two", "three", "four"})
        chat.say(text);
    EXPECT_TRUE(cli_has(chat.say("/compact 5"), "'5' is not a number of turns; there are 4"));
    EXPECT_TRUE(cli_has(chat.say("/compact 0"), "'0' is not a number of turns"));
    EXPECT_TRUE(cli_has(chat.say("/compact"), "nothing dropped"));
    std::string got = chat.say("/compact 2");
    EXPECT_EQ(chat_count(got, "dropped user: "), 2) << got;
    EXPECT_EQ(chat_count(got, "dropped assistant: "), 2) << got;
    EXPECT_TRUE(cli_has(got, "user: one") && cli_has(got, "user: two") && !cli_has(got, "user: three")) << got;
    std::string json = chat.exported();
    EXPECT_TRUE(cli_has(json, "Be brief.") && cli_has(json, "three") && !cli_has(json, "two")) << json;
    for (int i = 0; i < 5; i++) // until more than half of the context is taken
        chat.say("and again the same words");
    got = chat.say("/compact");
    int dropped = 0, turns = 0, left = 0, tokens = 0;
    const size_t at = got.find("dropped the oldest");
    ASSERT_NE(at, std::string::npos) << got;
    ASSERT_EQ(sscanf(got.c_str() + at, "dropped the oldest %d of %d turns; %d messages left, %d of 200", &dropped,
                     &turns, &left, &tokens),
              4)
        << got;
    EXPECT_EQ(turns, 7);
    EXPECT_EQ(left, 2 * (turns - dropped));
    EXPECT_LE(tokens, 100);
    EXPECT_EQ(chat_count(got, "dropped user: "), dropped);
    EXPECT_EQ(chat.leave(), 0);
}

// ---- signals ----

TEST(Chat, StopsAnAnswerWithCtrlCAndLeavesWithASecond) {
    cli_chat chat({"--ignore-eos", "--temp", "0"});
    chat.type("Tell me a story\n");
    chat.until("story");
    ASSERT_FALSE(chat.until("e", 30).empty()); // the answer has begun
    const double start = chat_seconds();
    chat.type("\x03");
    const std::string got = chat.until("\n> ", 5);
    printf("Ctrl-C in decode: back at the prompt after %.3f s\n", chat_seconds() - start);
    EXPECT_TRUE(cli_has(got, "the partial answer stays in the conversation")) << got;
    EXPECT_TRUE(cli_has(got, "(cancelled)")) << got;
    EXPECT_TRUE(cli_has(chat.say("/stats"), "2 messages"));
    chat.say("/set ignore-eos off");
    EXPECT_TRUE(cli_has(chat.say("What is your name?"), "| answer")) << "the next message works";
    chat.type("\x03");
    EXPECT_TRUE(cli_has(chat.until("> "), "Ctrl-C again")) << "something was entered since: this is a first one again";
    EXPECT_EQ(chat.leave("\x03"), 130);
}

TEST(Chat, StopsPrefillWithCtrlC) {
    cli_chat chat({"--chunk", "1", "-t", "1", "-s", cli_long_text(1800), "-n", "3", "--ignore-eos"});
    chat.type("Hello\n");
    usleep(200000);
    const double start = chat_seconds();
    chat.type("\x03");
    std::string got = chat.until("\n> ", 5);
    printf("Ctrl-C in prefill: back at the prompt after %.3f s\n", chat_seconds() - start);
    EXPECT_TRUE(cli_has(got, "no answer yet; /regen tries again")) << got;
    chat.say("/system -");
    EXPECT_TRUE(cli_has(chat.say("/regen"), "| answer 3 tokens"));
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Chat, WritesItsSessionWhenTheTerminalCloses) {
    test::temp_dir dir;
    for (int sig : {SIGHUP, SIGTERM}) {
        const std::string path = dir / std::to_string(sig);
        cli_chat chat({"--session", path, "--temp", "0"});
        chat.say("What is your name?");
        kill(chat.child.pid, sig);
        chat.child.rest();
        EXPECT_EQ(chat.child.status(10), 128 + sig);
        cli_chat next({"--session", path});
        EXPECT_TRUE(cli_has(next.greeting, ": 2 messages, ")) << next.greeting;
    }
    const std::string path = dir / "closed";
    cli_chat chat({"--session", path, "--temp", "0"});
    chat.say("What is your name?");
    close(chat.child.out); // the other end of the terminal
    chat.child.in = chat.child.out = -1;
    EXPECT_GT(chat.child.status(10), 0);
    cli_chat next({"--session", path});
    EXPECT_TRUE(cli_has(next.greeting, ": 2 messages, ")) << next.greeting;
}

// ---- the terminal ----

TEST(Chat, TakesAPasteAsOneMessage) {
    cli_chat chat({"-n", "1"});
    std::string shown = chat.child.paste("one\n\ttwo\n\nthree\n");
    shown += chat.until("\n> ");
    EXPECT_TRUE(cli_has(shown, "three") && cli_has(shown, "| answer 1 token (")) << shown;
    EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "one\\n\\ttwo\\n\\nthree")));
    shown = chat.child.paste("four\nfive"); // its last line has no end yet
    if (!cli_has(shown, "five"))
        shown += chat.until("five");
    chat.type(" six\n");
    shown += chat.until("| answer");
    EXPECT_TRUE(cli_has(shown, "six")) << shown;
    chat.until("\n> ");
    EXPECT_TRUE(cli_has(chat.say("/stats"), "4 messages"));
    chat.child.paste("/clear\nseven\n\"\"\"eight\n"); // a command is a line
    EXPECT_TRUE(cli_has(chat.until("| answer"), "cleared"));
    chat.until("\n> ");
    EXPECT_TRUE(cli_has(chat.say("/stats"), "2 messages"));
    chat.child.paste("nine\n\x04"); // answered before the end takes effect
    EXPECT_TRUE(cli_has(chat.until("| answer"), "| answer"));
    chat.child.rest();
    EXPECT_EQ(chat.child.status(5), 0);
}

// Terminals of today say where a paste begins and ends.
TEST(Chat, TakesAMarkedPasteAsText) {
    cli_chat chat({"-n", "1"}, cli_terminal({"TERM=xterm"}));
    if (!chat.edits())
        return; // this build has no line editor
    const std::string begin = "\x1b[200~", end = "\x1b[201~";
    EXPECT_TRUE(cli_has(chat.greeting, "\x1b[?2004h"));
    const auto last = [&chat] { // what the last message was, and nothing else
        const std::string all = chat.exported();
        const size_t at = all.rfind("{\"role\":\"user\"");
        return at == std::string::npos ? all : all.substr(at, all.find('}', at) + 1 - at);
    };
    chat.type(begin + "/clear\r\tone\x1b[A\r\rtwo\r" + end);
    std::string got = chat.until("| answer");
    EXPECT_TRUE(cli_has(got, "... two")) << got;
    chat.until("\n> ");
    EXPECT_EQ(last(), chat_message("user", "/clear\\n\\tone[A\\n\\ntwo"));
    chat.type("see: " + begin + "three\rfo" + end); // its last line is the user's to finish
    chat.until("... fo");
    usleep(100000);
    chat.type("ur\n");
    EXPECT_TRUE(cli_has(chat.until("| answer"), "| answer"));
    chat.until("\n> ");
    EXPECT_EQ(last(), chat_message("user", "see: three\\nfour"));
    chat.say(begin + "a word" + end + " and" + begin + end + " more"); // no lines: as if typed
    EXPECT_EQ(last(), chat_message("user", "a word and more"));
    chat.say("x\ny"); // two lines, then, and not one message
    EXPECT_TRUE(cli_has(chat.until("| answer") + chat.until("\n> "), "| answer"));
    EXPECT_EQ(last(), chat_message("user", "y"));
    std::string large; // in pieces, with pauses that would end a paste without marks
    for (int i = 0; i < 40; i++)
        large += "line " + std::to_string(i) + "\r";
    chat.type(begin + large.substr(0, 100));
    usleep(150000);
    chat.type(large.substr(100) + end.substr(0, 3));
    usleep(150000);
    chat.type(end.substr(3));
    EXPECT_TRUE(cli_has(chat.until("| answer"), "| answer"));
    chat.until("\n> ");
    got = last();
    EXPECT_TRUE(cli_has(got, "line 0\\nline 1\\n") && cli_has(got, "line 39\"}")) << got;
    EXPECT_EQ(chat.leave(), 0);
    EXPECT_TRUE(cli_has(chat.last, "\x1b[?2004l"));
    cli_chat dumb({}, cli_terminal({"TERM=dumb"}));
    EXPECT_FALSE(cli_has(dumb.greeting, "\x1b")) << dumb.greeting;
    EXPECT_EQ(dumb.leave(), 0);
}

// What is typed while the model answers waits: each line is one of its own, edited, and whole.
TEST(Chat, KeepsWhatIsTypedDuringAnAnswer) {
    for (const char *terminal : {"TERM=xterm", "TERM=dumb"}) {
        cli_chat chat({"-n", "300", "--ignore-eos"}, cli_terminal({terminal}));
        if (!chat.edits())
            return; // this build has no line editor
        chat.type("Hello\n");
        chat.until("Hello");
        ASSERT_FALSE(chat.until("e", 30).empty());          // the answer has begun
        const std::string text = "a" + cli_long_text(1125); // of 4501 bytes
        chat.type("/set max-tokens 1\n");
        chat.type("onf\x7f"
                  "e\n");
        for (size_t at = 0; at < text.size(); at += 500)
            chat.type(text.substr(at, 500));
        chat.type("\n/set temp 0\n");
        EXPECT_TRUE(cli_has(chat.until("temp is 0"), "max-tokens is 1")) << terminal;
        chat.until("\n> ");
        const std::string all = chat.exported();
        EXPECT_EQ(chat_count(all, "\"user\""), 3) << terminal;
        EXPECT_TRUE(cli_has(all, chat_message("user", "one"))) << terminal << all;
        EXPECT_TRUE(cli_has(all, chat_message("user", text))) << terminal;
        // Leaving in the middle gives the terminal back as it was.
        chat.say("/set max-tokens 600");
        chat.type("Hello\n");
        chat.until("Hello");
        ASSERT_FALSE(chat.until("e", 30).empty());
        termios t;
        ASSERT_EQ(tcgetattr(chat.child.out, &t), 0);
        EXPECT_FALSE(t.c_lflag & (ICANON | ECHO));
        kill(chat.child.pid, SIGINT), kill(chat.child.pid, SIGTERM);
        EXPECT_GT(chat.child.status(10), 128) << terminal << chat.until("never", 1);
        ASSERT_EQ(tcgetattr(chat.child.out, &t), 0);
        EXPECT_EQ(t.c_lflag & (ICANON | ECHO), tcflag_t(ICANON | ECHO));
    }
}

TEST(Chat, TakesALargePaste) {
    cli_chat chat;
    std::string text;
    for (int i = 0; text.size() < 100000; i++)
        text += "line " + std::to_string(i) + " of a long text that goes into the conversation\r";
    // All of it is one prompt, so none of it fits the context, and the tokens say that nothing was lost.
    const size_t least = cli_numbers(cli_run("tokenize", {"--json", "--no-bos"}, text).out, "ids").size();
    std::string shown = chat.child.paste(text);
    if (!cli_has(shown, "not answered"))
        shown += chat.until("not answered");
    shown = shown.substr(shown.rfind("not answered")) + chat.until("\n> ");
    int tokens = 0;
    ASSERT_EQ(sscanf(shown.c_str(), "not answered: with this message the prompt has %d tokens", &tokens), 1) << shown;
    EXPECT_NEAR(double(tokens), double(least), 100);
    EXPECT_TRUE(cli_has(chat.say("/stats"), "0 messages"));
    EXPECT_EQ(chat.leave("/exit\n"), 0);
}

TEST(Chat, SendsABlockThatCtrlDEnds) {
    cli_chat chat({"-n", "1"});
    chat.type("\"\"\"one\n");
    chat.until("... ");
    chat.type("two\n");
    chat.until("... ");
    chat.type("\x04");
    EXPECT_TRUE(cli_has(chat.until("| answer 1"), "| answer 1"));
    chat.until("\n> ");
    EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "one\\ntwo")));
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Chat, EditsCharactersNotBytes) {
    for (const char *terminal : {"TERM=xterm-256color", "TERM=dumb"}) {
        cli_chat chat({"-n", "1"}, cli_terminal({terminal, "LC_ALL=", "LANG="}));
        const std::string e_acute = "\xc3\xa9", llama = "\xf0\x9f\xa6\x99", combining = "e\xcc\x81";
        // h e' llama <x <x | e + accent <x: each backspace takes one code point back
        chat.say("h" + e_acute + llama + "\x7f\x7f" + combining + "\x7f" + "y" + llama);
        EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "hey" + llama))) << terminal << chat.exported();
        chat.say("a" + combining + "\x7f\x7f" + e_acute + "z");
        EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "a" + e_acute + "z"))) << terminal << chat.exported();
        EXPECT_EQ(chat.leave(), 0);
    }
}

// What only an editor of our own can do.
TEST(Chat, KnowsTheKeysOfATerminal) {
    cli_chat chat({"-n", "1"}, cli_terminal({"TERM=xterm"}));
    if (!chat.edits())
        return; // this build has no line editor
    const std::string llama = "\xf0\x9f\xa6\x99";
    chat.say("ab" + llama + "d\x1b[D\x1b[D\x1bOD\x1b[CX\x1b[3~"); // left, left, left, right, X, delete the llama
    EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "abXd"))) << chat.exported();
    // F1, F5, F12, insert, page up, shift-F3, F1 of a console: none of them leaves anything in the text
    chat.say("c\x1bOP\x1b[15~\x1b[24~\x1b[2~\x1b[5~\x1b[1;2R\x1b[[Ad");
    EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "cd"))) << chat.exported();
    chat.say("world\x1b[Hhello \x1b[F!\x01oh, \x05!\x15\x19"); // home, end, ^A, ^E, ^U, ^Y
    EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "oh, hello world!!"))) << chat.exported();
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Chat, KeepsItsHistory) {
    test::temp_dir dir;
    const std::string where = "XDG_STATE_HOME=" + dir / "state", file = dir / "state/engine/history";
    for (int run = 0; run < 2; run++) {
        cli_chat chat({"-n", "1"}, cli_terminal({where}));
        if (!chat.edits())
            return; // this build has no line editor
        if (run == 0) {
            chat.say("a line of before \xc3\xa9");
        } else {
            chat.say("\x1b[A!"); // up
            EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "a line of before \xc3\xa9!")));
        }
        EXPECT_EQ(chat.leave(), 0);
    }
    struct stat st = {};
    ASSERT_EQ(stat(file.c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 0777, 0600u);
    EXPECT_TRUE(cli_has(test::read_file(file), "a line of before \xc3\xa9\na line of before \xc3\xa9!\n"));
    // A long file is cut down to its end, a wrong one is no reason not to talk.
    std::string many;
    for (int i = 0; i < 3000; i++)
        many += "old " + std::to_string(i) + "\n";
    test::write_file(file, many);
    {
        cli_chat chat({}, cli_terminal({where}));
        EXPECT_EQ(chat.leave(), 0);
        const std::string kept = test::read_file(file);
        EXPECT_EQ(kept.substr(0, 9), "old 2000\n");
        EXPECT_TRUE(cli_has(kept, "old 2999\n"));
    }
    ASSERT_EQ(unlink(file.c_str()), 0);
    ASSERT_EQ(mkdir(file.c_str(), 0700), 0);
    {
        cli_chat chat({"-n", "1"}, cli_terminal({where}));
        EXPECT_TRUE(cli_has(chat.say("Hello"), "| answer"));
        EXPECT_EQ(chat.leave(), 0);
    }
    // Without a home there is no file, and nothing is missed.
    const std::string here = dir / "nowhere";
    ASSERT_EQ(mkdir(here.c_str(), 0700), 0);
    cli_place place = cli_terminal({"XDG_STATE_HOME=", "HOME="});
    place.program = "/bin/sh";
    char *model = realpath(cli_model().c_str(), nullptr), *engine = realpath(cli_engine().c_str(), nullptr);
    cli_child chat({"-c", std::string("cd '") + here + "' && exec '" + engine + "' chat '" + model + "' -n 1"}, place);
    free(model), free(engine);
    chat.read_until("> ");
    chat.type("Hello\n");
    EXPECT_FALSE(cli_has(chat.read_until("\n> "), "history"));
    chat.type("\x04");
    chat.rest();
    EXPECT_EQ(chat.status(5), 0);
    EXPECT_EQ(test::shell("ls -A '" + here + "'").out, "");
}

TEST(Chat, CompletesCommandsAndFiles) {
    test::temp_dir dir;
    test::write_file(dir / "conversation", "What is your name?");
    test::write_file(dir / "b1", "");
    test::write_file(dir / "b2", "");
    ASSERT_EQ(mkdir((dir / "sub").c_str(), 0700), 0);
    cli_chat chat({"-n", "1"}, cli_terminal({"TERM=xterm"}));
    if (!chat.edits())
        return; // this build has no line editor
    chat.type("/re\t");
    const std::string list = chat.until("/regen");
    EXPECT_TRUE(cli_has(list, "/read ")) << list;
    chat.type("a\t" + dir.path + "/co\t\n");
    EXPECT_TRUE(cli_has(chat.until("| answer"), "| answer"));
    chat.until("\n> ");
    EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "What is your name?")));
    chat.type("/read " + dir.path + "/b\t");
    EXPECT_TRUE(cli_has(chat.until("b2  "), "b1  "));
    chat.type("\x15/read " + dir.path + "/s\t");
    EXPECT_TRUE(cli_has(chat.until("ub/", 10), "ub/"));
    chat.type("\x15");
    chat.say("a\tb");
    EXPECT_TRUE(cli_has(chat.exported(), chat_message("user", "a\\tb"))) << "elsewhere it is a tab";
    EXPECT_EQ(chat.leave(), 0);
}

TEST(Chat, FollowsTheSizeOfItsTerminal) {
    for (const char *terminal : {"TERM=xterm", "TERM=dumb"}) {
        cli_chat chat({"--ignore-eos", "-n", "150"}, cli_terminal({terminal}));
        chat.type("a line that is ");
        chat.until("is ");
        for (int columns : {20, 7, 120, 33}) {
            chat.resize(columns);
            usleep(20000);
            chat.type(std::to_string(columns) + " ");
        }
        chat.type("wide\n");
        chat.until("| answer", 30);
        chat.until("\n> ");
        EXPECT_TRUE(cli_has(chat.exported(), "a line that is 20 7 120 33 wide")) << terminal << chat.exported();
        chat.type("again\n");
        for (int columns = 20; columns < 120; columns += 5) { // while it answers
            chat.resize(columns);
            usleep(5000);
        }
        EXPECT_TRUE(cli_has(chat.until("(length)"), "answer 150 tokens")) << terminal;
        chat.until("\n> ");
        chat.type("/stats\n"); // a prompt may be drawn once more before it is read
        EXPECT_TRUE(cli_has(chat.until("4 messages"), "4 messages")) << terminal;
        chat.until("\n> ");
        EXPECT_EQ(chat.leave(), 0);
    }
}

TEST(Chat, DrawsItsLineAnewInPlace) {
    cli_chat chat({}, cli_terminal({"TERM=xterm"}));
    if (!chat.edits())
        return; // this build has no line editor
    chat.type("0123456789");
    chat.until("9");
    chat.resize(100);
    EXPECT_EQ(chat.until("9", 5), "\r\x1b[J> 0123456789");
    chat.resize(8); // the cursor was in the first row, and may be in the second now: nothing above is taken away
    EXPECT_EQ(chat.until("> ", 5), "\r\x1b[J> ");
    chat.until("9", 5);
    chat.resize(6);
    EXPECT_EQ(chat.until("> ", 5), "\r\x1b[1A\x1b[J> ");
    EXPECT_EQ(chat.leave("\x15\x04"), 0);
}

TEST(Chat, NeverUsesColour) {
    for (const std::vector<std::string> &env : {std::vector<std::string>{"TERM=xterm-256color", "NO_COLOR=1"},
                                                {"TERM=xterm-256color", "COLORTERM=truecolor"}}) {
        cli_chat chat({"-n", "4"}, cli_terminal(env));
        std::string all = chat.greeting + chat.say("Hello") + chat.say("/nonsense") + chat.say("/help");
        EXPECT_EQ(chat.leave(), 0);
        EXPECT_FALSE(chat_has_colour(all + chat.last)) << all;
        cli_child run({"run", cli_model(), "-p", "Hello", "-n", "4"}, cli_terminal(env));
        EXPECT_FALSE(cli_has(run.rest(), "\x1b"));
    }
}

TEST(Chat, NeedsATerminalForItsOutput) {
    test::temp_dir dir;
    cli_place place = cli_terminal();
    place.program = "/bin/sh";
    cli_child chat({"-c", "'" + cli_engine() + "' chat '" + cli_model() + "' > '" + dir / "out" + "'"}, place);
    EXPECT_TRUE(cli_has(chat.rest(), "chat needs a terminal for its output"));
    EXPECT_EQ(chat.status(5), 2);
    EXPECT_EQ(test::read_file(dir / "out"), "");
    cli_child run({"run", cli_model()}, cli_terminal());
    EXPECT_TRUE(cli_has(run.rest(), "no prompt"));
    EXPECT_EQ(run.status(5), 2);
}

// A model without a template completes text, and says so.
TEST(Chat, CompletesTextWithoutATemplate) {
    test::temp_dir dir;
    cli_write_chain(dir / "m.gguf", {"<unk>", "<s>", "</s>", "a", "b", "c", "\n"}, {2, 2, 2, 4, 5, 2, 2}); // a b c end
    cli_chat chat({"--temp", "0"}, cli_terminal(), dir / "m.gguf");
    EXPECT_TRUE(cli_has(chat.greeting, "no chat template")) << chat.greeting;
    EXPECT_TRUE(cli_has(chat.say("a"), "\nbc\r\n"));
    EXPECT_TRUE(cli_has(chat.say("b"), "\nc\r\n"));
    EXPECT_EQ(chat.exported(), "[\n" + chat_message("user", "a") + ",\n" + chat_message("assistant", "bc") + ",\n" +
                                   chat_message("user", "b") + ",\n" + chat_message("assistant", "c") + "]\n");
    EXPECT_TRUE(cli_has(chat.say("/stats"), "7 of 256 tokens")) << "a b c, newline, b c, end: " << chat.say("/stats");
    EXPECT_TRUE(cli_has(chat.say("/system x"), "no chat template"));
    EXPECT_EQ(chat.leave(), 0);
}

// ---- sessions ----

// Everything of a conversation comes back, and it goes on as if it had not been left.
TEST(Sessions, GoOnInANewProcess) {
    test::temp_dir dir;
    const std::string file = dir / "s", question = "Can you help me?";
    std::string whole;
    {
        cli_chat chat({"--temp", "0.9", "--seed", "5", "-s", "Be brief."});
        chat.say("/set top-k 7");
        chat.say("What is your name?");
        chat.say(question);
        whole = chat.exported();
        EXPECT_EQ(chat.leave(), 0);
    }
    {
        cli_chat chat({"--temp", "0.9", "--seed", "5", "-s", "Be brief.", "--session", file});
        chat.say("/set top-k 7");
        chat.say("What is your name?");
        EXPECT_EQ(chat.leave(), 0);
        struct stat st = {};
        ASSERT_EQ(stat(file.c_str(), &st), 0);
        EXPECT_EQ(st.st_mode & 0777, 0600u);
    }
    {
        cli_chat chat({"--session", file});
        EXPECT_TRUE(cli_has(chat.greeting, file + ": 2 messages, ")) << chat.greeting;
        std::string got = chat.say("/set");
        for (const char *part : {"temp               0.9", "top-k              7", "seed               5"})
            EXPECT_TRUE(cli_has(got, part)) << part << " in " << got;
        EXPECT_TRUE(cli_has(chat.say("/system"), "Be brief."));
        got = chat.say(question);
        EXPECT_FALSE(cli_has(got, "(0 reused)")) << got;
        EXPECT_EQ(chat.exported(), whole);
        EXPECT_EQ(chat.leave(), 0);
    }
    {
        cli_chat chat({"--session", file, "--top-k", "3"});
        EXPECT_TRUE(cli_has(chat.say("/set top-k"), " 3\r")) << "an option wins";
        chat.say("/clear");
        EXPECT_TRUE(cli_has(chat.say("/load " + file), ": 4 messages, "));
        EXPECT_TRUE(cli_has(chat.say("/set top-k"), " 7\r")) << "/load takes the file as it is";
        EXPECT_EQ(chat.exported(), whole);
        EXPECT_EQ(chat.leave(), 0);
    }
}

TEST(Sessions, AreTheSameForRunAndChat) {
    test::temp_dir dir;
    const std::string file = dir / "s";
    const command_result first = cli_run("run", {"-p", "What is your name?", "--temp", "0", "--session", file});
    EXPECT_EQ(first.code, 0) << first.err;
    const command_result second = cli_run("run", {"-p", "Hello", "--session", file});
    EXPECT_TRUE(cli_has(second.err, "reused)") && !cli_has(second.err, "(0 reused)")) << second.err;
    cli_chat chat({"--session", file});
    EXPECT_EQ(chat.exported(), "[\n" + chat_message("user", "What is your name?") + ",\n" +
                                   chat_message("assistant", first.out.substr(0, first.out.size() - 1)) + ",\n" +
                                   chat_message("user", "Hello") + ",\n" +
                                   chat_message("assistant", second.out.substr(0, second.out.size() - 1)) + "]\n");
    EXPECT_EQ(chat.leave(), 0);
    const command_result raw = cli_run("run", {"-p", "Hi", "-s", "Be brief.", "--session", file + "2", "-n", "1"});
    EXPECT_EQ(raw.code, 0) << raw.err;
    EXPECT_TRUE(cli_has(raw.err, "answer 1 token (")) << raw.err;
    const command_result none = cli_run("run", {"-p", "Hi", "--raw", "--session", file + "2"});
    EXPECT_EQ(none.code, 1);
    EXPECT_TRUE(cli_has(none.err, "--raw uses no chat template, so " + file + "2, which has a system message,"))
        << none.err;
    // The logits after it are those of the conversation as a whole, and asking for them changes nothing.
    const std::string before = test::read_file(file);
    const command_result logits = cli_run("run", {"--logits", "-p", "Bye", "--session", file, "-q"});
    EXPECT_EQ(logits.code, 0) << logits.err;
    EXPECT_EQ(test::read_file(file), before);
}

TEST(Sessions, AreRefusedWhenDamaged) {
    test::temp_dir dir;
    const std::string file = dir / "s";
    ASSERT_EQ(cli_run("run", {"-p", "Hello", "-n", "4", "--session", file}).code, 0);
    const std::string good = test::read_file(file);
    std::vector<std::string> wrong = {"", "x", good.substr(0, good.size() / 2), good + "x"};
    std::mt19937 random(1);
    for (int i = 0; i < 8; i++) {
        wrong.push_back(good);
        wrong.back()[random() % good.size()] ^= char(1 << random() % 8);
    }
    cli_chat chat({"-n", "4"});
    chat.say("Hello");
    const std::string talk = chat.exported();
    for (const std::string &bytes : wrong) {
        test::write_file(file, bytes);
        const command_result r = cli_run("run", {"-p", "Hi", "-n", "1", "--session", file});
        EXPECT_EQ(r.code, 1) << r.err;
        EXPECT_EQ(r.out, "");
        EXPECT_TRUE(cli_has(r.err, file)) << r.err;
        EXPECT_EQ(test::read_file(file), bytes) << "it stays untouched";
        EXPECT_TRUE(cli_has(chat.say("/load " + file), file + ": "));
        EXPECT_EQ(chat.exported(), talk);
    }
    EXPECT_TRUE(cli_has(chat.say("Go on"), "| answer"));
    EXPECT_EQ(chat.leave(), 0);
    // What cannot be written in the end shows at the start.
    const command_result r = cli_run("run", {"-p", "Hi", "--session", dir / "no/such"});
    EXPECT_EQ(r.code, 1);
    EXPECT_TRUE(cli_has(r.err, "No such file")) << r.err;
}

// The library of the build, for files that no program of ours writes.
void *chat_function(const char *name) {
    const char *dir = getenv("ENGINE_BUILD");
    static void *library =
        dlopen((test::root_path(dir && *dir ? dir : "build/release") + "/libengine.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : nullptr;
}
#define CHAT_CALL(name) reinterpret_cast<decltype(&(name))>(chat_function(#name))

TEST(Sessions, WithAWrongNoteAreRefused) {
    ASSERT_TRUE(chat_function("engine_save")) << dlerror();
    test::temp_dir dir;
    engine_model *model = nullptr;
    engine_session *session = nullptr;
    engine_error err = {};
    ASSERT_EQ(CHAT_CALL(engine_open)(&model, cli_model().c_str(), nullptr, &err), 0) << err.msg;
    ASSERT_EQ(CHAT_CALL(engine_session_new)(&session, model, nullptr, &err), 0) << err.msg;
    const int32_t ids[] = {1, 2, 3};
    ASSERT_GE(CHAT_CALL(engine_sync)(session, ids, 3, &err), 0) << err.msg;
    const auto bytes = [](std::initializer_list<const char *> strings) {
        std::string s;
        for (const char *part : strings)
            s += part, s += '\0';
        return s;
    };
    const char *version = "engine conversation 1";
    const struct {
        std::string note;
        const char *says; // null: it is taken
    } cases[] = {
        {"x", "no conversation of this program"},
        {bytes({"another program"}), "no conversation of this program"},
        {bytes({"engine conversation 2"}), "another version"},
        {bytes({version, "message", "user"}), "damaged"},
        {bytes({version, "message", "tool", "x"}), "damaged"},
        {bytes({version, "system", "", "x", "system", "", "y"}), "damaged"},
        {bytes({version, "set", "nonsense", "1"}), "damaged"},
        {bytes({version, "set", "temp", "hot"}), "damaged"},
        {bytes({version, "set", "model", "x"}), "damaged"},
        {bytes({version, "message", "user", "x"}) + "y", "damaged"},
        {bytes({version}), nullptr},
        {bytes({version, "system", "", "s", "set", "temp", "0", "message", "user", "x"}), nullptr},
        {"", nullptr}, // tokens only
    };
    const std::string file = dir / "s";
    cli_chat chat({"-n", "2"});
    chat.say("Hello");
    const std::string talk = chat.exported();
    for (const auto &c : cases) {
        ASSERT_EQ(CHAT_CALL(engine_set_note)(session, c.note.data(), c.note.size(), &err), 0) << err.msg;
        ASSERT_EQ(CHAT_CALL(engine_save)(session, file.c_str(), &err), 0) << err.msg;
        const command_result r = cli_run("run", {"-p", "Hi", "-n", "1", "--logits", "--session", file});
        EXPECT_EQ(r.code, c.says ? 1 : 0) << c.note << r.err;
        if (!c.says)
            continue;
        EXPECT_TRUE(cli_has(r.err, file) && cli_has(r.err, c.says)) << r.err << " does not say " << c.says;
        EXPECT_TRUE(cli_has(chat.say("/load " + file), c.says));
        EXPECT_EQ(chat.exported(), talk);
    }
    EXPECT_TRUE(cli_has(chat.say("/load " + file), "only tokens"));
    EXPECT_TRUE(cli_has(chat.say("Go on"), "| answer")) << "the conversation is what it was";
    EXPECT_EQ(chat.leave(), 0);
    CHAT_CALL(engine_session_free)(session);
    CHAT_CALL(engine_close)(model);
}

TEST(Sessions, KeepTheOldFileWhenTheDiskIsFull) {
    test::temp_dir dir;
    const auto fill = [](const std::string &folder, const cli_place &place, const char *says) {
        const std::string file = folder + "/s";
        ASSERT_EQ(cli_run("run", {"-p", "Hello", "-n", "4", "--session", file}).code, 0);
        const std::string old = test::read_file(file);
        cli_chat chat({"--session", file, "-n", "2"}, place);
        chat.say(cli_long_text(1000)); // 2 kB of cache for each
        EXPECT_TRUE(cli_has(chat.say("/save " + file), says));
        EXPECT_EQ(test::read_file(file), old);
        chat.type("\x04");
        const std::string stays = chat.until("\n> ");
        EXPECT_TRUE(cli_has(stays, says) && cli_has(stays, "/save it to another file, or leave again")) << stays;
        EXPECT_EQ(chat.leave(), 1) << "what cannot be kept is no success";
        EXPECT_TRUE(cli_has(chat.last, says)) << chat.last;
        EXPECT_EQ(test::read_file(file), old);
        EXPECT_EQ(test::shell("ls -A '" + folder + "'").out, "s\n") << "nothing is left behind";
    };
    cli_place place = cli_terminal();
    place.file_size = 1000000;
    ASSERT_EQ(mkdir((dir / "limit").c_str(), 0700), 0);
    fill(dir / "limit", place, "File too large");
    ASSERT_EQ(mkdir((dir / "disk").c_str(), 0700), 0);
    if (mount("tmpfs", (dir / "disk").c_str(), "tmpfs", 0, "size=1m") == 0) { // where we may
        fill(dir / "disk", cli_terminal(), "No space left");
        EXPECT_EQ(umount((dir / "disk").c_str()), 0) << strerror(errno);
    }
}

// Whoever comes second to a file that another process has written keeps that, and its own conversation beside it.
TEST(Sessions, OfTwoProcessesAreBothKept) {
    test::temp_dir dir;
    const std::string file = dir / "s";
    const auto holds = [](const std::string &path, const std::string &text) {
        cli_chat chat({"--session", path});
        return cli_has(chat.exported(), chat_message("user", text)) && chat.leave() == 0;
    };
    for (int round = 0; round < 2; round++) { // without a file at first, then with one
        const std::string n = std::to_string(round), words[] = {"first" + n, "second" + n, "third" + n};
        cli_chat a({"--session", file, "-n", "2"}), b({"--session", file, "-n", "2"}), idle({"--session", file});
        a.say(words[0]);
        const std::string got = b.say(words[1]), other = file + "." + std::to_string(round + 1);
        EXPECT_TRUE(cli_has(got, file + ": another process has written it; this conversation goes to " + other)) << got;
        EXPECT_EQ(a.leave(), 0);
        EXPECT_EQ(b.leave(), 1);
        EXPECT_EQ(idle.leave(), 0) << "it has nothing to add";
        EXPECT_TRUE(holds(file, words[0]) && holds(other, words[1]));
    }
    // The same for run, whose answer takes a while.
    cli_child run({"run", cli_model(), "-p", "from run", "--ignore-eos", "-n", "1900", "--session", file});
    run.close_input();
    EXPECT_FALSE(run.read_until("a").empty());
    EXPECT_EQ(cli_run("run", {"-p", "quick", "-n", "1", "--session", file}).code, 0);
    kill(run.pid, SIGINT);
    EXPECT_EQ(run.status(20), 130);
    EXPECT_TRUE(holds(file, "quick"));
    EXPECT_TRUE(holds(file + ".3", "from run"));
}

TEST(Sessions, AreWrittenAfterEachAnswer) {
    test::temp_dir dir;
    const std::string file = dir / "a", other = dir / "b";
    {
        cli_chat chat({"--session", file, "-n", "2", "--temp", "0", "--stop", "x", "--seed", "-1"});
        chat.say("Hello");
        kill(chat.child.pid, SIGKILL);
        EXPECT_GT(chat.child.status(5), 0);
    }
    {
        cli_chat chat({"--session", file});
        EXPECT_TRUE(cli_has(chat.greeting, ": 2 messages, ")) << chat.greeting;
        std::string got = chat.say("/set");
        EXPECT_TRUE(cli_has(got, "temp               0\r")) << got;
        EXPECT_FALSE(cli_has(got, "\"x\"")) << "a stop string belongs to the run that gave it: " << got;
        EXPECT_TRUE(cli_has(chat.say("What is your name?"), "(stop)")) << "-n as well";
        EXPECT_TRUE(cli_has(chat.say("/save " + other), "saved to"));
        EXPECT_TRUE(cli_has(chat.say("/clear"), file + " gets this conversation in place"));
        EXPECT_TRUE(cli_has(chat.say("/load " + other), file + " gets this conversation in place"));
        EXPECT_EQ(chat.leave(), 0);
    }
    { // a chat without a file goes on in the one that it loads
        const std::string before = test::read_file(file);
        cli_chat chat({"-n", "1"});
        EXPECT_TRUE(cli_has(chat.say("/load " + other), "is written to this file"));
        chat.say("Once more");
        EXPECT_EQ(chat.leave(), 0);
        EXPECT_EQ(test::read_file(file), before);
    }
    cli_chat chat({"--session", other});
    EXPECT_TRUE(cli_has(chat.greeting, ": 6 messages, ")) << chat.greeting;
    EXPECT_EQ(chat.leave(), 0);
}

// Also what the model was saying when the terminal closed, or when no one read on.
TEST(Sessions, KeepWhatWasNotHeard) {
    test::temp_dir dir;
    const std::string file = dir / "s";
    {
        cli_chat chat({"--session", file, "--ignore-eos", "--temp", "0"});
        chat.type("Tell me a story\n");
        chat.until("story");
        ASSERT_FALSE(chat.until("e", 30).empty());
        close(chat.child.out);
        chat.child.in = chat.child.out = -1;
        EXPECT_GT(chat.child.status(10), 0);
        cli_chat next({"--session", file});
        EXPECT_TRUE(cli_has(next.greeting, ": 2 messages, ")) << next.greeting;
        EXPECT_EQ(next.leave(), 0);
    }
    const command_result r = cli_shell("$E run $M -p Hello --ignore-eos -n 500 --session '" + file + "2' | head -c 1");
    EXPECT_EQ(r.out.size(), 1u);
    cli_chat next({"--session", file + "2"});
    EXPECT_TRUE(cli_has(next.greeting, ": 2 messages, ")) << next.greeting;
}

// Killed while it saves again and again, a chat leaves the old conversation or the new one.
TEST(Sessions, SurviveAKill) {
    test::temp_dir dir;
    const std::string file = dir / "s";
    std::mt19937 random(3);
    const auto stored = [&] { // the conversation in the file, as the prompt it makes
        const command_result r = cli_run("run", {"--logits", "-p", "z", "--session", file, "-q"});
        EXPECT_EQ(r.code, 0) << r.err;
        std::string ids;
        for (double id : cli_numbers(r.out, "prompt_ids"))
            ids += std::to_string(int(id)) + " ";
        return cli_run("tokenize", {"--decode"}, ids).out;
    };
    ASSERT_EQ(cli_run("run", {"-p", "round 0", "-n", "1", "--session", file}).code, 0);
    int fresh = 0;
    std::string before = stored();
    for (int round = 1; round <= 50; round++) {
        cli_chat chat({"-n", "1", "-q"});
        const std::string words = "round " + std::to_string(round) + cli_long_text(random() % 200);
        chat.say(words);
        std::string saves;
        for (int i = 0; i < 20; i++)
            saves += "/save " + file + "\n";
        chat.type(saves);
        usleep(40000 + random() % 60000); // the first line waits for the end of the paste
        kill(chat.child.pid, SIGKILL);
        EXPECT_EQ(chat.child.status(5), 128 + 1000 + SIGKILL);
        const std::string after = stored();
        EXPECT_TRUE(after == before || cli_has(after, words)) << round << ": " << after;
        fresh += after != before;
        before = after;
    }
    printf("%d of 50 kills left the new file\n", fresh);
    EXPECT_GT(fresh, 0);
}

// Whatever was taken back, tried again, cancelled, left out, saved and loaded: the conversation that remains makes the
// model say what it says to a fresh process that gets it whole.
TEST(Sessions, AreWhatTheirHistorySays) {
    test::temp_dir dir;
    std::mt19937 random(11);
    const std::vector<std::string> shape = {"-n", "12", "-c", "600"};
    std::vector<std::string> options = shape;
    options.insert(options.end(), {"--temp", "0.9", "--seed", "1"});
    cli_chat chat(options);
    const char *const words[] = {"Hello",
                                 "What is your name?",
                                 "Tell me a story",
                                 "Can you help me find a restaurant?",
                                 "and then?",
                                 "no, another one please",
                                 "caf\xc3\xa9 \xf0\x9f\xa6\x99"};
    bool saved[3] = {};
    int turns = 0, cancelled = 0, loaded = 0;
    // A cancel may come before, in or after the work: the chat is at its prompt again when it answers a command.
    int asked = 0;
    const auto settle = [&] {
        usleep(20000);
        for (int i = 0; i < 20; i++) { // what was typed before the signal may be lost
            const std::string word = "'try-" + std::to_string(asked++) + "'";
            chat.type("/set " + word.substr(1, word.size() - 2) + "\n");
            if (cli_has(chat.until(word, 2), word))
                break;
        }
        chat.until("\n> ");
    };
    while (turns < 200) {
        const unsigned dice = random() % 100;
        std::string got;
        if (dice < 50) {
            got = chat.say(words[random() % 7]);
            turns++;
        } else if (dice < 62) {
            got = chat.say("/undo");
        } else if (dice < 76) {
            got = chat.say("/regen");
            turns++;
        } else if (dice < 78) {
            got = chat.say("/clear");
        } else if (dice < 84) {
            const unsigned slot = random() % 3;
            got = chat.say("/save " + dir / std::to_string(slot));
            EXPECT_TRUE(cli_has(got, "saved to")) << got;
            saved[slot] = true;
        } else if (dice < 88) {
            const unsigned slot = random() % 3;
            if (saved[slot]) {
                got = chat.say("/load " + dir / std::to_string(slot));
                EXPECT_TRUE(cli_has(got, "tokens; this conversation had")) << got;
                loaded++;
            }
        } else {
            chat.type(std::string(words[random() % 7]) + "\n");
            usleep(random() % 40000);
            kill(chat.child.pid, SIGINT);
            settle();
            turns++, cancelled++;
        }
        if (cli_has(got, "not answered")) {
            EXPECT_TRUE(cli_has(chat.say("/compact"), "dropped the oldest"));
        }
    }
    EXPECT_GT(cancelled, 5);
    EXPECT_GT(loaded, 0);
    chat.say("/compact");
    const std::string question = "What is your name?";
    std::string json = chat.exported();
    // A last message that was cancelled before its answer is dropped by the next one.
    const size_t last = json.rfind("\n{\"role\":\"user\"");
    if (last != std::string::npos && json.find("\"assistant\"", last) == std::string::npos)
        json.erase(last - (json[last - 1] == ',')).append("]\n");
    json.erase(json.rfind(']'));
    json += (cli_has(json, "{") ? "," : "") + chat_message("user", question) + "]";
    test::write_file(dir / "final.json", json);
    chat.say("/set temp 0");
    chat.say(question);
    std::vector<std::string> fresh = shape;
    fresh.insert(fresh.end(), {"--temp", "0", "-q", "--messages", dir / "final.json"});
    const command_result r = cli_run("run", fresh);
    EXPECT_EQ(r.code, 0) << r.err;
    std::string text = r.out.substr(0, r.out.size() - 1), end = chat.exported();
    EXPECT_FALSE(text.empty());
    // The answer as the export writes it.
    std::string escaped;
    for (char c : text)
        escaped += c == '\n' ? std::string("\\n") : c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    EXPECT_TRUE(cli_has(end, chat_message("assistant", escaped) + "]\n")) << end << "\nfresh: " << text;
    EXPECT_EQ(chat.leave(), 0);
}

} // namespace
