// Sessions: whatever is reused, rewound, saved, loaded or computed in one batch with others, the logits are those of a
// cold start, bit for bit.
#include "unit.h"

#include "opened.h"

#include <random>
#include <sys/resource.h>

namespace {

const char *const session_rows[] = {"f16", "q8_0"};

// Logits after `ids`, in a model and session of their own.
std::vector<float> session_cold(const std::string &path, const model_ids &ids, const char *kv) {
    open_model m(path, 2);
    open_session s(m.m, 4096, 64, kv);
    s.sync(ids);
    return s.logits();
}

model_ids session_first(const model_ids &ids, size_t n) { return model_ids(ids.begin(), ids.begin() + ptrdiff_t(n)); }

// `n` tokens of `ids`, then others.
model_ids session_branch(const model_ids &ids, size_t n, size_t total) {
    model_ids out = session_first(ids, n);
    while (out.size() < total)
        out.push_back((ids[out.size()] + 7) % 2048);
    return out;
}

const size_t session_lengths[] = {1, 127, 128, 129, 300};

struct temp_file : test::temp_dir {
    std::string file = *this / "session";
};

} // namespace

TEST(SessionBits, ReusedPrefixEqualsCold) {
    const model_ids ids = model_prompt(420, 2048);
    for (const char *kv : session_rows) {
        open_model m(model_shipped, 2);
        open_session first(m.m, 1024, 100, kv);
        first.sync(ids);
        for (size_t n : session_lengths) {
            const model_ids other = session_branch(ids, n, n + 40);
            const std::vector<float> cold = session_cold(model_shipped, other, kv);
            open_session s(m.m, 1024, 100, kv);
            EXPECT_EQ(s.sync(other), int(n / 128 * 128)) << "whole pages of another session";
            EXPECT_EQ(s.stats().shared_tokens, int64_t(n / 128 * 128));
            EXPECT_EQ(s.logits(), cold) << kv << " " << n;
            // In the session itself every token that is the same is reused.
            open_session own(m.m, 1024, 100, kv);
            own.sync(session_first(ids, 400));
            EXPECT_GE(own.sync(other), int(n));
            EXPECT_EQ(own.logits(), cold) << kv << " " << n;
        }
        // What others did with the shared pages changed nothing.
        first.sync(session_first(ids, 410));
        EXPECT_EQ(first.logits(), session_cold(model_shipped, session_first(ids, 410), kv));
    }
}

TEST(SessionBits, RewindEqualsCold) {
    const model_ids ids = model_prompt(420, 2048);
    for (const char *kv : session_rows) {
        open_model m(model_shipped, 2);
        open_session s(m.m, 1024, 100, kv), holder(m.m, 1024, 100, kv);
        for (const bool shared : {false, true}) {
            s.sync(ids);
            if (shared)
                holder.sync(ids); // the pages have two holders now: none may be written in place
            for (size_t i = std::size(session_lengths); i-- > 0;) {
                const size_t n = session_lengths[i];
                ASSERT_EQ(engine_rewind(s.s, n, &s.err), 0) << s.err.msg;
                EXPECT_EQ(s.logits(), session_cold(model_shipped, session_first(ids, n), kv)) << kv << " " << n;
                const model_ids other = session_branch(ids, n, n + 20);
                s.eval(model_ids(other.begin() + ptrdiff_t(n), other.end()));
                EXPECT_EQ(s.logits(), session_cold(model_shipped, other, kv)) << kv << " " << n;
            }
        }
        EXPECT_EQ(holder.logits(), session_cold(model_shipped, ids, kv));
    }
}

TEST(SessionBits, BatchEqualsAlone) {
    const model_ids ids = model_prompt(420, 2048), more = session_branch(ids, 0, 420);
    for (const char *kv : session_rows)
        for (size_t n : session_lengths) {
            open_model m(model_shipped, 2);
            open_session a(m.m, 1024, 64, kv), b(m.m, 512, 100, kv), c(m.m, 600, 512, kv);
            const model_ids left = session_first(more, 77), right = session_first(more, 333),
                            mine = session_first(ids, n);
            b.sync(session_first(left, 40));
            std::vector<std::vector<float>> got[3];
            struct target {
                std::vector<std::vector<float>> *rows;
                size_t width;
            } to = {got, 2048};
            const auto keep = [](void *user, size_t item, size_t i, const float *logits) {
                target &t = *static_cast<target *>(user);
                EXPECT_EQ(t.rows[item].size(), i);
                t.rows[item].emplace_back(logits, logits + t.width);
                return 0;
            };
            const engine_batch_item items[] = {
                {b.s, left.data() + 40, left.size() - 40}, {a.s, mine.data(), n}, {c.s, right.data(), right.size()}};
            ASSERT_EQ(engine_step(items, 3, keep, &to, &a.err), 0) << a.err.msg;
            EXPECT_EQ(a.logits(), session_cold(model_shipped, mine, kv)) << kv << " " << n;
            EXPECT_EQ(b.logits(), session_cold(model_shipped, left, kv));
            EXPECT_EQ(c.logits(), session_cold(model_shipped, right, kv));
            EXPECT_EQ(got[0].size(), 37u);
            EXPECT_EQ(got[2].size(), 333u);
            ASSERT_EQ(got[1].size(), n);
            EXPECT_EQ(got[1].back(), a.logits());
            EXPECT_EQ(got[1][n / 2], session_cold(model_shipped, session_first(ids, n / 2 + 1), kv)) << "a row inside";
            // One token each: a decode step of all three.
            const int32_t next[] = {5, 6, 7};
            const engine_batch_item step[] = {{a.s, next, 1}, {b.s, next + 1, 1}, {c.s, next + 2, 1}};
            ASSERT_EQ(engine_step(step, 3, nullptr, nullptr, &a.err), 0) << a.err.msg;
            model_ids longer = mine;
            longer.push_back(5);
            EXPECT_EQ(a.logits(), session_cold(model_shipped, longer, kv));
            longer = right;
            longer.push_back(7);
            EXPECT_EQ(c.logits(), session_cold(model_shipped, longer, kv));
        }
}

// Run by the test below in a new process: loads, says how many tokens it had to evaluate, and writes the logits.
TEST(SessionChild, DISABLED_Loads) {
    const char *file = getenv("ENGINE_TEST_SESSION");
    ASSERT_TRUE(file);
    open_model m(getenv("ENGINE_TEST_MODEL"), 1);
    open_session s(m.m, 1024, 50, getenv("ENGINE_TEST_KV"));
    ASSERT_GE(engine_load(s.s, file, &s.err), 0) << s.err.msg;
    const std::vector<float> logits = s.logits();
    const model_ids greedy = s.greedy(32);
    std::string out(reinterpret_cast<const char *>(logits.data()), logits.size() * 4);
    out.append(reinterpret_cast<const char *>(greedy.data()), greedy.size() * 4);
    out += std::to_string(s.stats().evaluated - 31);
    test::write_file(std::string(file) + ".out", out);
}

TEST(SessionBits, LoadInANewProcessEqualsCold) {
    const model_ids ids = model_prompt(300, 2048);
    for (const char *kv : session_rows)
        for (size_t n : {size_t(1), size_t(127), size_t(128), size_t(129), size_t(130), size_t(300)}) {
            temp_file dir;
            open_model m(model_shipped, 2);
            open_session s(m.m, 1024, 64, kv);
            s.sync(session_first(ids, n));
            const std::vector<float> want = s.logits();
            ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
            EXPECT_EQ(want, session_cold(model_shipped, session_first(ids, n), kv));
            const model_ids greedy = s.greedy(32);
            char self[4096] = {};
            ASSERT_GT(readlink("/proc/self/exe", self, sizeof self - 1), 0);
            const test::command_result r =
                test::run({"/usr/bin/env", "ENGINE_TEST_SESSION=" + dir.file, "ENGINE_TEST_MODEL=" + model_shipped,
                           std::string("ENGINE_TEST_KV=") + kv, self, "--gtest_also_run_disabled_tests",
                           "--gtest_filter=SessionChild.DISABLED_Loads"});
            ASSERT_EQ(r.code, 0) << r.out << r.err;
            std::string want_out(reinterpret_cast<const char *>(want.data()), want.size() * 4);
            want_out.append(reinterpret_cast<const char *>(greedy.data()), greedy.size() * 4);
            EXPECT_TRUE(test::read_file(dir.file + ".out") == want_out + "1")
                << kv << " " << n << ": one token is evaluated again, no more";
        }
}

TEST(SessionFile, CarriesTheTimelineTheNoteAndNothingElse) {
    temp_file dir;
    open_model m(model_shipped, 2);
    const model_ids ids = model_prompt(300, 2048);
    open_session s(m.m, 512), fresh(m.m, 512);
    s.sync(ids);
    s.sync(session_first(ids, 150)); // the rest may not be in the file
    ASSERT_EQ(engine_set_note(s.s, "a\0b", 3, &s.err), 0);
    const int32_t pending = 9;
    engine_generate_options go = {};
    go.max_tokens = 1;
    s.generate(go); // leaves a token pending
    ASSERT_EQ(engine_tokens(s.s, nullptr, 0), 151);
    ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
    struct stat st;
    ASSERT_EQ(stat(dir.file.c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 07777, 0600u);
    EXPECT_NE(access((dir.file + ".part").c_str(), F_OK), 0);

    EXPECT_EQ(engine_load(fresh.s, dir.file.c_str(), &fresh.err), 151) << fresh.err.msg;
    char note[8];
    ASSERT_EQ(engine_note(fresh.s, note, sizeof note), 3);
    EXPECT_EQ(std::string(note, 3), std::string("a\0b", 3));
    s.eval({pending}), fresh.eval({pending});
    EXPECT_EQ(fresh.logits(), s.logits());

    // The same timeline, reached without the tokens that were dropped, gives the same file.
    open_model other(model_shipped, 1);
    open_session direct(other.m, 300);
    temp_file second;
    direct.sync(session_first(ids, 150));
    engine_set_note(direct.s, "a\0b", 3, nullptr);
    direct.generate(go);
    ASSERT_EQ(engine_save(direct.s, second.file.c_str(), &direct.err), 0) << direct.err.msg;
    EXPECT_TRUE(test::read_file(second.file) == test::read_file(dir.file)) << "rows of dropped tokens are in the file";
}

namespace {

// Loading `bytes` fails with a message that has `words`, and the session stays as it was.
void session_refused(open_session &s, const std::string &path, const std::string &bytes, const std::string &words) {
    test::write_file(path, bytes);
    const model_ids before(5, 3);
    s.sync(before);
    const std::vector<float> logits = s.logits();
    s.err.msg[0] = 0;
    EXPECT_LT(engine_load(s.s, path.c_str(), &s.err), 0) << words;
    EXPECT_NE(std::string(s.err.msg).find(words), std::string::npos) << s.err.msg << " | " << words;
    EXPECT_NE(std::string(s.err.msg).find("session"), std::string::npos) << "names the file: " << s.err.msg;
    model_ids now(16);
    now.resize(size_t(engine_tokens(s.s, now.data(), now.size())));
    EXPECT_EQ(now, before);
    EXPECT_EQ(s.logits(), logits);
}

} // namespace

TEST(SessionFile, WrongCutFlippedAndNewerFilesAreRefused) {
    temp_file dir;
    open_model m(model_shipped, 2);
    open_session s(m.m, 512), small(m.m, 100), q8(m.m, 512, 0, "q8_0");
    s.sync(model_prompt(140, 2048));
    engine_set_note(s.s, "note", 4, nullptr);
    ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
    const std::string good = test::read_file(dir.file);
    const std::string path = dir / "session.bad";
    const auto with = [&](size_t at, const std::string &bytes) {
        std::string out = good;
        return out.replace(at, bytes.size(), bytes);
    };
    session_refused(s, path, "", "too short");
    session_refused(s, path, with(0, "GGUF"), "is not a session file");
    session_refused(s, path, with(8, std::string("\2\0\0\0", 4)), "version 2");
    session_refused(s, path, with(12, std::string("\7\0\0\0", 4)), "other arithmetic");
    session_refused(s, path, with(20, "x"), "another model");
    session_refused(small, path, good, "exceeds the available context size of 100");
    session_refused(q8, path, good, "rows of type F16");
    session_refused(s, path, good + "x", "damaged");
    for (size_t cut = 1; cut < good.size(); cut += cut < 900 ? 37 : good.size() / 40)
        session_refused(s, path, good.substr(0, cut), "");
    std::mt19937 random(3);
    for (int i = 0; i < 60; i++) { // one flipped bit, anywhere
        const size_t at = i < 30 ? random() % 900 : random() % good.size();
        session_refused(s, path, with(at, std::string(1, char(good[at] ^ (1 << random() % 8)))), "");
    }
    test::temp_dir empty;
    EXPECT_EQ(engine_load(s.s, (empty / "absent").c_str(), &s.err), ENGINE_EIO);
    EXPECT_NE(std::string(s.err.msg).find("absent"), std::string::npos);
    EXPECT_LT(engine_load(s.s, empty.path.c_str(), &s.err), 0) << "a folder";
    EXPECT_LT(engine_load(s.s, "/dev/zero", &s.err), 0);
    test::write_file(path, good);
    EXPECT_EQ(engine_load(s.s, path.c_str(), &s.err), 140) << s.err.msg;
}

// Heads with checksums that are right and numbers that are not.
TEST(SessionFile, ImpossibleNumbersAreRefused) {
    temp_file dir;
    open_model m(model_shipped, 1);
    open_session s(m.m, 512);
    s.sync(model_prompt(140, 2048));
    ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
    const std::string good = test::read_file(dir.file);
    session_head head;
    memcpy(&head, good.data(), sizeof head);
    const uint64_t page = head.page_bytes[0] + 32;
    const size_t head_bytes = good.size() - 2 * page - 32;
    const auto forge = [&](session_head h, int32_t token, int32_t rows) {
        std::string bytes = good.substr(0, head_bytes);
        memcpy(&bytes[0], &h, sizeof h);
        memcpy(&bytes[sizeof h + 4 * 7], &token, 4);
        memcpy(&bytes[head_bytes - 4], &rows, 4);
        const digest d = sha256().add(bytes.data(), bytes.size()).finish();
        return bytes + std::string(reinterpret_cast<const char *>(d.b), 32) + good.substr(head_bytes + 32);
    };
    std::mt19937_64 random(5);
    const std::string path = dir / "session.bad";
    for (int field = 0; field < 8; field++)
        for (const uint64_t value : {uint64_t(0), uint64_t(1), uint64_t(3), head.n_tokens + 1, uint64_t(1) << 31,
                                     uint64_t(1) << 62, UINT64_MAX, uint64_t(random())}) {
            session_head h = head;
            uint64_t *fields[] = {&h.page_bytes[0], &h.page_bytes[1], &h.n_tokens,   &h.n_done,
                                  &h.n_note,        &h.n_pages[0],    &h.n_pages[1], &h.n_tail};
            if (*fields[field] == value)
                continue;
            *fields[field] = value;
            session_refused(s, path, forge(h, 1, 12), "");
        }
    session_head h = head;
    h.n_checkpoint = 1;
    session_refused(s, path, forge(h, 1, 12), "");
    session_refused(s, path, forge(head, -1, 12), "token 7");
    session_refused(s, path, forge(head, 2048, 12), "token 7");
    session_refused(s, path, forge(head, 1, 11), "rows");
    session_refused(s, path, forge(head, 1, 129), "rows");
    session_refused(s, path, forge(head, 1, 12), "damaged"); // the pages' checksums hold for another head
}

TEST(SessionFile, AFullDiskLeavesTheOldFile) {
    temp_file dir;
    open_model m(model_shipped, 1);
    open_session s(m.m, 512);
    s.sync(model_prompt(20, 2048));
    ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
    const std::string old = test::read_file(dir.file);
    s.sync(model_prompt(400, 2048));
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    void (*old_handler)(int) = signal(SIGXFSZ, SIG_IGN);
    for (const rlim_t limit : {rlim_t(0), rlim_t(100), rlim_t(100000)}) {
        rlimit less = before;
        less.rlim_cur = limit;
        setrlimit(RLIMIT_FSIZE, &less);
        const int code = engine_save(s.s, dir.file.c_str(), &s.err);
        setrlimit(RLIMIT_FSIZE, &before);
        EXPECT_EQ(code, ENGINE_EIO);
        EXPECT_NE(std::string(s.err.msg).find("session.part: cannot be written"), std::string::npos) << s.err.msg;
        EXPECT_TRUE(test::read_file(dir.file) == old);
        EXPECT_NE(access((dir.file + ".part").c_str(), F_OK), 0);
    }
    signal(SIGXFSZ, old_handler);
    EXPECT_EQ(engine_save(s.s, (dir / "no/such/folder").c_str(), &s.err), ENGINE_EIO);
    EXPECT_EQ(engine_save(s.s, dir.path.c_str(), &s.err), ENGINE_EIO) << "a folder is not replaced";
    EXPECT_NE(access((dir.path + ".part").c_str(), F_OK), 0);
    ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
    for (const std::string &path : {dir / "pipe", std::string("/dev/null")}) {
        EXPECT_EQ(engine_save(s.s, path.c_str(), &s.err), ENGINE_EIO);
        EXPECT_NE(std::string(s.err.msg).find("is not a file"), std::string::npos) << s.err.msg;
    }
    ASSERT_EQ(symlink("session", (dir / "link").c_str()), 0);
    ASSERT_EQ(engine_save(s.s, (dir / "link").c_str(), &s.err), 0) << s.err.msg;
    EXPECT_EQ(engine_load(s.s, dir.file.c_str(), &s.err), 400) << "the file behind a link is written";
}

namespace {

// Every page of every pool is held, idle or unused, and the lists agree.
void session_check_pages(const engine_model &m) {
    for (const auto &store : m.stores)
        for (const page_pool &pool : store->pool) {
            size_t held = 0, idle = 0, listed = 0;
            for (const page &p : pool.pages)
                held += p.refs > 0, idle += p.refs == 0 && p.named;
            EXPECT_EQ(held + idle + pool.unused.size(), pool.pages.size());
            for (int32_t id = pool.oldest; id >= 0; id = pool.pages[size_t(id)].newer)
                listed++;
            EXPECT_EQ(listed, idle);
            EXPECT_GE(int64_t(pool.pages.size()), pool.reserved);
        }
}

// Random sync, eval, rewind, save, load, steps of several sessions and cancels: at every point the logits are those of
// a cold start.
void session_random_history(const std::string &path) {
    const int rounds = test::long_tests() ? 400 : 60;
    for (const char *kv : session_rows) {
        temp_file dir;
        open_model m(path, 2);
        open_session a(m.m, 700, 50, kv, 3), b(m.m, 700, 128, kv, -1), c(m.m, 700, 33, kv);
        open_session *sessions[] = {&a, &b, &c};
        model_ids lines[3], saved;
        std::mt19937 random(11);
        const auto token = [&] { return int32_t(random() % 5); }; // few, so that timelines meet again
        for (int i = 0; i < rounds; i++) {
            const size_t k = random() % 3;
            open_session &s = *sessions[k];
            model_ids &line = lines[k];
            const size_t n = random() % 300;
            switch (random() % 7) {
            case 0: // what another one has, and more
                line = session_first(lines[(k + 1) % 3], std::min(n, lines[(k + 1) % 3].size()));
                line.push_back(token());
                s.sync(line);
                break;
            case 1:
                while (line.size() < std::min<size_t>(690, n))
                    line.push_back(token());
                s.sync(line);
                break;
            case 2: {
                model_ids more;
                while (more.size() < n % 20 + 1 && line.size() + more.size() < 690)
                    more.push_back(token());
                s.eval(more);
                line.insert(line.end(), more.begin(), more.end());
                break;
            }
            case 3:
                line.resize(std::min(line.size(), n));
                ASSERT_EQ(engine_rewind(s.s, line.size(), &s.err), 0);
                break;
            case 4:
                ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
                saved = line;
                break;
            case 5:
                if (saved.empty())
                    break;
                ASSERT_EQ(engine_load(s.s, dir.file.c_str(), &s.err), int(saved.size())) << s.err.msg;
                line = saved;
                break;
            case 6: {
                engine_batch_item items[3];
                int32_t ids[3] = {token(), token(), token()};
                for (size_t j = 0; j < 3; j++) {
                    items[j] = {sessions[j]->s, ids + j, lines[j].size() < 690};
                    if (items[j].n)
                        lines[j].push_back(ids[j]);
                }
                ASSERT_EQ(engine_step(items, 3, nullptr, nullptr, &s.err), 0) << s.err.msg;
            }
            }
            model_ids held(1024);
            held.resize(size_t(engine_tokens(s.s, held.data(), held.size())));
            ASSERT_EQ(held, line);
            if (i % 5 == 4 && !line.empty()) {
                ASSERT_TRUE(s.logits() == session_cold(path, line, kv)) << kv << " round " << i;
            }
        }
        session_check_pages(*m.m);
    }
}

} // namespace

TEST(SessionBits, RandomHistory) { session_random_history(model_shipped); }

namespace {

// Six window layers of seven.
std::string session_window_model(const test::temp_dir &dir, int window) {
    return model_make(dir, "--preset gemma3-tiny --vocab 2048 --type Q8_0 --window " + std::to_string(window));
}

} // namespace

TEST(SessionWindow, RandomHistory) {
    for (const int window : {16, 200}) {
        test::temp_dir dir;
        session_random_history(session_window_model(dir, window));
    }
}

TEST(SessionWindow, PagesGoBackToThePool) {
    test::temp_dir dir;
    const std::string path = session_window_model(dir, 100);
    open_model m(path, 2);
    open_session s(m.m, 4096, 64, "f16", -1);
    const model_ids ids = model_prompt(3000, 2048);
    s.sync(ids);
    const page_pool &all = s.s->cache.store.pool[SEES_ALL], &window = s.s->cache.store.pool[SEES_WINDOW];
    EXPECT_EQ(all.layout.n_layer, 1);
    EXPECT_EQ(window.layout.n_layer, 6);
    EXPECT_LE(window.pages.size(), 4u) << "a window of 100 and a chunk of 64 need no more";
    EXPECT_EQ(all.pages.size(), 32u);
    EXPECT_EQ(s.logits(), session_cold(path, ids, "f16")) << "a smaller context that is as large as it must be";
    // Without a checkpoint, what lies far back is computed again from the beginning, exactly.
    ASSERT_EQ(engine_rewind(s.s, 700, &s.err), 0);
    EXPECT_EQ(s.logits(), session_cold(path, session_first(ids, 700), "f16"));
}

TEST(SessionWindow, CheckpointsMakeTurnsResumable) {
    test::temp_dir dir;
    const std::string path = session_window_model(dir, 100), file = dir / "session";
    open_model m(path, 2);
    open_session s(m.m, 4096, 64, "f16", 4);
    const model_ids ids = model_prompt(2000, 2048);
    for (const size_t n : {size_t(500), size_t(900), size_t(1300)}) // turns
        s.sync(session_first(ids, n));
    EXPECT_EQ(s.stats().n_checkpoints, 3);
    ASSERT_EQ(engine_save(s.s, file.c_str(), &s.err), 0) << s.err.msg;
    const auto back = [&](open_session &t, size_t n) { // rows evaluated to get the logits after n tokens
        const int64_t before = t.stats().evaluated;
        EXPECT_EQ(engine_rewind(t.s, n, &t.err), 0) << t.err.msg;
        EXPECT_EQ(t.logits(), session_cold(path, session_first(ids, n), "f16"));
        return t.stats().evaluated - before;
    };
    EXPECT_EQ(back(s, 900), 1) << "the end of a turn";
    EXPECT_EQ(back(s, 500), 1) << "the end of a turn";
    EXPECT_EQ(s.stats().n_checkpoints, 1);
    EXPECT_LE(back(s, 480), 480) << "no checkpoint, computed from what is left";

    // They come back with the file, in another model object too.
    open_model other(path, 1);
    open_session t(other.m, 2000, 128, "f16", 4), none(other.m, 2000, 128, "f16", -1),
        few(other.m, 2000, 100, "f16", 1);
    ASSERT_EQ(engine_load(t.s, file.c_str(), &t.err), 1300) << t.err.msg;
    EXPECT_EQ(t.stats().n_checkpoints, 3);
    EXPECT_EQ(back(t, 900), 1);
    ASSERT_EQ(engine_load(none.s, file.c_str(), &none.err), 1300) << none.err.msg;
    EXPECT_EQ(none.logits(), session_cold(path, session_first(ids, 1300), "f16"));
    ASSERT_EQ(engine_load(few.s, file.c_str(), &few.err), 1300) << few.err.msg;
    EXPECT_EQ(few.stats().n_checkpoints, 1);
    session_check_pages(*other.m);
}

TEST(SessionWindow, CheckpointsThinOutAndKeepTheirNumber) {
    test::temp_dir dir;
    const std::string path = session_window_model(dir, 40);
    open_model m(path, 2);
    open_session s(m.m, 4096, 64, "f16", 5);
    const model_ids ids = model_prompt(3000, 2048);
    for (size_t n = 100; n <= 3000; n += 100)
        s.sync(session_first(ids, n));
    const std::vector<checkpoint> &list = s.s->cache.checkpoints;
    ASSERT_EQ(list.size(), 5u);
    EXPECT_EQ(list.back().pos, 2999);
    for (size_t i = 1; i + 1 < list.size(); i++)
        EXPECT_LE(list[i + 1].pos - list[i].pos, 2 * (list[i].pos - list[i - 1].pos)) << "denser towards the end";
    EXPECT_LE(s.stats().checkpoint_bytes, int64_t(5 * s.s->cache.share.per_checkpoint) *
                                              int64_t(s.s->cache.store.pool[SEES_WINDOW].layout.page_bytes));
    session_check_pages(*m.m);
}

// A prompt that took another way in the middle of a long prefix leaves a checkpoint there.
TEST(SessionWindow, APrefixIsComputedOnce) {
    test::temp_dir dir;
    const std::string path = session_window_model(dir, 40);
    open_model m(path, 2);
    open_session s(m.m, 2048, 64, "f16", 4);
    const model_ids ids = model_prompt(1500, 2048);
    const auto ask = [&](int32_t question) {
        model_ids prompt = session_first(ids, 1000);
        for (int i = 0; i < 300; i++)
            prompt.push_back(question);
        const int64_t before = s.stats().evaluated;
        s.sync(prompt);
        EXPECT_EQ(s.logits(), session_cold(path, prompt, "f16"));
        return s.stats().evaluated - before;
    };
    EXPECT_EQ(ask(1), 1300);
    EXPECT_LE(ask(2), 1300);
    EXPECT_EQ(ask(3), 300) << "now there is a checkpoint at the end of the prefix";
    EXPECT_EQ(ask(4), 300);
}

TEST(SessionPages, AreSharedAndCountedOnce) {
    open_model m(model_shipped, 2);
    const model_ids ids = model_prompt(300, 2048);
    open_session a(m.m, 512), b(m.m, 512);
    a.sync(ids);
    EXPECT_EQ(b.sync(ids), 256 + 0) << "two pages; the tokens behind them are evaluated";
    EXPECT_EQ(b.s->cache.table[0][0], a.s->cache.table[0][0]);
    EXPECT_EQ(b.s->cache.table[0][1], a.s->cache.table[0][1]);
    EXPECT_NE(b.s->cache.table[0][2], a.s->cache.table[0][2]) << "an incomplete page belongs to one session";
    // A page that becomes complete is the same page for both.
    const model_ids longer = model_prompt(400, 2048);
    b.sync(longer), a.sync(longer);
    EXPECT_EQ(b.s->cache.table[0][2], a.s->cache.table[0][2]);
    // What a freed session leaves is found again, in a new one as well.
    {
        open_session gone(m.m, 512);
        gone.sync(model_ids(300, 17));
    }
    open_session c(m.m, 512);
    EXPECT_EQ(c.sync(model_ids(300, 17)), 256);
    // Tokens are compared, not only hashes.
    page_pool &pool = a.s->cache.store.pool[SEES_ALL];
    pool.pages[size_t(a.s->cache.table[0][1])].tokens[77] ^= 1;
    open_session d(m.m, 512);
    EXPECT_EQ(d.sync(longer), 128);
    EXPECT_EQ(d.logits(), session_cold(model_shipped, longer, nullptr));
}

TEST(SessionPages, ThousandQuestionsWithOnePrefix) {
    open_model m(model_shipped, 2);
    model_ids prefix = model_prompt(260, 2048);
    open_session s(m.m, 512);
    s.sync(prefix);
    const int64_t before = s.stats().evaluated;
    for (int i = 0; i < 50; i++) {
        model_ids question = prefix;
        question.push_back(i);
        question.push_back(i + 1);
        open_session fresh(m.m, 512);
        EXPECT_EQ(fresh.sync(question), 256);
        EXPECT_EQ(fresh.stats().evaluated, 6);
        EXPECT_EQ(s.sync(question), 260);
    }
    EXPECT_EQ(s.stats().evaluated - before, 100);
}

TEST(SessionPages, OldOnesMakeRoom) {
    open_model m(model_shipped, 2);
    open_session s(m.m, 256); // two pages
    for (int round = 0; round < 6; round++) {
        s.sync(model_ids(200, round % 3));
        EXPECT_EQ(s.logits(), session_cold(model_shipped, model_ids(200, round % 3), nullptr));
    }
    EXPECT_EQ(s.s->cache.store.pool[SEES_ALL].pages.size(), 2u);
}

TEST(SessionPlan, EqualsTheAllocatorToTheByte) {
    test::temp_dir dir;
    for (const std::string &path : {model_shipped, session_window_model(dir, 100)})
        for (const char *kv : session_rows)
            for (const int n_ctx : {1, 127, 129, 700, 5000})
                for (const int chunk : {1, 7, 512}) {
                    engine_open_options open = {};
                    open.threads = 2;
                    engine_session_options options = {};
                    options.n_ctx = n_ctx;
                    options.chunk = chunk;
                    options.kv = kv;
                    engine_plan_info plan = {};
                    engine_error err = {};
                    ASSERT_EQ(engine_plan(path.c_str(), &open, &options, &plan, &err), 0) << err.msg;
                    open_model m(path, 2);
                    engine_model_info info = {};
                    engine_info(m.m, &info, nullptr);
                    EXPECT_EQ(info.allocated_bytes, 0);
                    open_session s(m.m, n_ctx, chunk, kv);
                    const auto allocated = [&] {
                        info.size = sizeof info;
                        engine_info(m.m, &info, nullptr);
                        return info.allocated_bytes;
                    };
                    EXPECT_EQ(allocated(), plan.cache_bytes + plan.work_bytes + plan.scratch_bytes)
                        << n_ctx << " " << chunk;
                    // And nothing more is allocated when it computes.
                    s.sync(model_prompt(std::min(n_ctx, chunk == 512 ? 1500 : 20), 2048));
                    engine_generate_options go = {};
                    go.ignore_end = 1;
                    go.max_tokens = 20;
                    s.generate(go);
                    EXPECT_GT(engine_tokens(s.s, nullptr, 0), 0);
                    EXPECT_EQ(allocated(), plan.cache_bytes + plan.work_bytes + plan.scratch_bytes)
                        << n_ctx << " " << chunk;
                    int64_t widened = 0;
                    for (const buffer &b : m.m->w.owned)
                        widened += int64_t(b.size);
                    EXPECT_EQ(plan.widened_bytes, widened);
                    int64_t pages = 0;
                    for (const page_pool &p : m.m->stores[0]->pool)
                        pages += int64_t(p.pages.size() * p.layout.page_bytes);
                    EXPECT_EQ(plan.cache_bytes, pages);
                    EXPECT_EQ(plan.session_bytes,
                              int64_t(s.s->tokens.capacity() + s.s->logits.capacity() + s.s->itl.capacity()) * 4);
                    EXPECT_EQ(plan.weight_bytes, info.weight_bytes);
                }
}

namespace {

int session_throw(void *, size_t, const float *) { throw 7; }

} // namespace

// A callback that throws ends the call like any failure: nothing that was not evaluated stays.
TEST(SessionStep, ThrowingCallbacksLeaveAWholeSession) {
    for (const int window : {0, 16, 200}) {
        temp_file dir;
        const std::string path = window ? session_window_model(dir, window) : model_shipped;
        open_model m(path, 2);
        open_session s(m.m, 1024, 100);
        const model_ids ids = model_prompt(700, 2048);
        s.sync(session_first(ids, 300));
        for (int i = 0; i < 3; i++) {
            EXPECT_EQ(engine_eval_all(s.s, ids.data() + 300, 200, session_throw, nullptr, &s.err), ENGINE_EINTERNAL);
            EXPECT_STREQ(s.err.msg, "a callback threw");
            EXPECT_EQ(engine_tokens(s.s, nullptr, 0), 300);
            ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
        }
        EXPECT_EQ(s.logits(), session_cold(path, session_first(ids, 300), nullptr));
        ASSERT_EQ(engine_load(s.s, dir.file.c_str(), &s.err), 300) << s.err.msg;
        s.sync(ids);
        EXPECT_EQ(s.logits(), session_cold(path, ids, nullptr));
        session_check_pages(*m.m);
    }
}

// What would wait for the lock that its own caller holds is an error.
TEST(SessionStep, CallbacksUnderTheLockMayNotCompute) {
    temp_file dir;
    open_model m(model_shipped, 1);
    open_session a(m.m, 64), b(m.m, 64);
    b.sync({1, 2, 3});
    struct target {
        engine_model *model;
        engine_session *other;
        std::string file;
        int codes[6];
    } to = {m.m, b.s, dir.file, {}};
    const auto fn = [](void *user, size_t, const float *) {
        target &t = *static_cast<target *>(user);
        const int32_t id = 1;
        const float *logits;
        engine_session *made;
        const int codes[] = {
            engine_eval(t.other, &id, 1, nullptr),         engine_sync(t.other, &id, 1, nullptr),
            engine_save(t.other, t.file.c_str(), nullptr), engine_load(t.other, t.file.c_str(), nullptr),
            engine_logits(t.other, &logits, nullptr),      engine_session_new(&made, t.model, nullptr, nullptr)};
        std::copy(codes, codes + 6, t.codes);
        return 0;
    };
    const int32_t id = 5;
    ASSERT_EQ(engine_eval_all(a.s, &id, 1, fn, &to, &a.err), 0) << a.err.msg;
    for (int code : to.codes)
        EXPECT_EQ(code, ENGINE_EINVAL);
    EXPECT_EQ(b.eval({4}), 0) << "afterwards it may";
}

TEST(SessionFile, ACancelIsNotForSaving) {
    temp_file dir;
    open_model m(model_shipped, 1);
    open_session s(m.m, 64);
    s.sync({1, 2, 3});
    engine_cancel(s.s);
    EXPECT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
    EXPECT_EQ(engine_load(s.s, dir.file.c_str(), &s.err), 3) << s.err.msg;
    const int32_t id = 1;
    EXPECT_EQ(engine_eval(s.s, &id, 1, &s.err), ENGINE_ECANCELLED) << "it is for the next call that computes";
    ASSERT_EQ(mkfifo((dir.file + "2.part").c_str(), 0600), 0);
    EXPECT_EQ(engine_save(s.s, (dir.file + "2").c_str(), &s.err), ENGINE_EIO) << "a pipe in the way does not hang";
}

// The content of a file is not vouched for: it is used in the session that loaded it only.
TEST(SessionFile, OtherSessionsDoNotSeeItsPages) {
    temp_file dir;
    const model_ids ids = model_prompt(300, 2048);
    {
        open_model m(model_shipped, 1);
        open_session s(m.m, 512);
        s.sync(ids);
        ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
    }
    std::string bytes = test::read_file(dir.file); // other values in page 0, with a checksum that is right
    session_head head;
    memcpy(&head, bytes.data(), sizeof head);
    const size_t page = size_t(head.page_bytes[0]), at = bytes.size() - 3 * (page + 32);
    bytes[at + 1] = char(bytes[at + 1] ^ 0x20);
    digest sum;
    memcpy(&sum, &bytes[at - 32], 32);
    sum = sha256().value(sum).value(uint64_t(0)).add(&bytes[at], page).finish();
    memcpy(&bytes[at + page], &sum, 32);
    test::write_file(dir.file, bytes);

    open_model m(model_shipped, 1);
    open_session s(m.m, 1024), other(m.m, 1024);
    ASSERT_EQ(engine_load(s.s, dir.file.c_str(), &s.err), 300) << s.err.msg;
    const model_ids longer = model_prompt(600, 2048);
    s.sync(longer);
    EXPECT_NE(s.logits(), session_cold(model_shipped, longer, nullptr)) << "the test's change counts";
    EXPECT_EQ(other.sync(longer), 0);
    EXPECT_EQ(other.logits(), session_cold(model_shipped, longer, nullptr));
    engine_rewind(s.s, 0, nullptr);
    EXPECT_EQ(s.sync(longer), 512) << "its own are all gone, the other's are there";
    EXPECT_EQ(s.logits(), other.logits());
}

TEST(SessionWindow, OddWindows) {
    for (const int window : {1, 2, 127, 128, 129}) {
        temp_file dir;
        const std::string path = session_window_model(dir, window);
        open_model m(path, 2);
        const model_ids ids = model_prompt(600, 2048);
        open_session s(m.m, 600, 37), t(m.m, 600, 512);
        for (const size_t n : {size_t(128), size_t(255), size_t(256), size_t(257)}) {
            s.sync(session_first(ids, n));
            ASSERT_EQ(engine_save(s.s, dir.file.c_str(), &s.err), 0) << s.err.msg;
            ASSERT_EQ(engine_load(t.s, dir.file.c_str(), &t.err), int(n)) << t.err.msg;
            const model_ids longer = session_first(ids, n + 200);
            t.sync(longer);
            EXPECT_EQ(t.logits(), session_cold(path, longer, nullptr)) << window << " " << n;
        }
        session_check_pages(*m.m);
    }
    test::temp_dir dir; // a window that no context reaches
    const std::string path = session_window_model(dir, 1000), key = "gemma3.attention.sliding_window";
    std::string bytes = test::read_file(path);
    size_t at = bytes.find(key);
    while (at != std::string::npos && bytes[at + key.size()] == '_')
        at = bytes.find(key, at + 1);
    ASSERT_NE(at, std::string::npos);
    const int32_t most = INT_MAX;
    memcpy(&bytes[at + key.size() + 4], &most, 4); // behind the key's type
    test::write_file(path, bytes);
    engine_session_options options = {};
    options.n_ctx = 1000;
    engine_plan_info plan = {};
    engine_error err = {};
    ASSERT_EQ(engine_plan(path.c_str(), nullptr, &options, &plan, &err), 0) << err.msg;
    EXPECT_GE(plan.cache_bytes, plan.page_bytes * 8);
    EXPECT_LT(plan.cache_bytes, plan.page_bytes * 100);
}

TEST(SessionStep, BadBatchesAreErrors) {
    open_model m(model_shipped, 1), other(model_shipped, 1);
    open_session a(m.m, 64), b(m.m, 64), c(other.m, 64), q(m.m, 64, 0, "q8_0");
    const int32_t id = 1, wrong = -4;
    const engine_batch_item twice[] = {{a.s, &id, 1}, {a.s, &id, 1}}, mixed[] = {{a.s, &id, 1}, {c.s, &id, 1}},
                            types[] = {{a.s, &id, 1}, {q.s, &id, 1}}, null[] = {{a.s, &id, 1}, {nullptr, &id, 1}},
                            token[] = {{a.s, &id, 1}, {b.s, &wrong, 1}};
    EXPECT_EQ(engine_step(twice, 2, nullptr, nullptr, &a.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_step(mixed, 2, nullptr, nullptr, &a.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_step(types, 2, nullptr, nullptr, &a.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_step(null, 2, nullptr, nullptr, &a.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_step(token, 2, nullptr, nullptr, &a.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_step(nullptr, 1, nullptr, nullptr, &a.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_step(nullptr, 0, nullptr, nullptr, &a.err), 0);
    const model_ids many(65, 1);
    const engine_batch_item over[] = {{a.s, &id, 1}, {b.s, many.data(), many.size()}};
    EXPECT_EQ(engine_step(over, 2, nullptr, nullptr, &a.err), ENGINE_ECONTEXT);
    EXPECT_EQ(engine_tokens(a.s, nullptr, 0), 0) << "nothing was appended to any of them";
    engine_cancel(b.s);
    const engine_batch_item good[] = {{a.s, &id, 1}, {b.s, &id, 1}};
    EXPECT_EQ(engine_step(good, 2, nullptr, nullptr, &a.err), ENGINE_ECANCELLED);
    EXPECT_EQ(engine_step(good, 2, nullptr, nullptr, &a.err), 0) << a.err.msg;
    EXPECT_EQ(a.logits(), b.logits());
}

TEST(SessionStep, CancelInTheMiddleLosesNothing) {
    open_model m(model_shipped, 2);
    open_session a(m.m, 512, 16), b(m.m, 512, 16);
    const model_ids ids = model_prompt(200, 2048);
    struct target {
        engine_session *session;
        int rows;
    } to = {b.s, 0};
    const auto cancel = [](void *user, size_t, size_t, const float *) {
        target &t = *static_cast<target *>(user);
        if (++t.rows == 100)
            engine_cancel(t.session);
        return 0;
    };
    const engine_batch_item items[] = {{a.s, ids.data(), 150}, {b.s, ids.data(), 200}};
    EXPECT_EQ(engine_step(items, 2, cancel, &to, &a.err), ENGINE_ECANCELLED);
    model_ids held(512);
    held.resize(size_t(engine_tokens(a.s, held.data(), held.size())));
    EXPECT_EQ(held, session_first(ids, held.size()));
    EXPECT_LT(held.size(), 150u);
    a.sync(ids), b.sync(ids);
    EXPECT_EQ(a.logits(), session_cold(model_shipped, ids, nullptr));
    EXPECT_EQ(b.logits(), a.logits());
}

// Four threads, each with its own session on one model; a fifth cancels one of them again and again.
TEST(SessionStep, FourThreadsOnOneModelOneCancelled) {
    const double seconds = test::long_tests() ? 60 : 2;
    open_model m(model_shipped, 2);
    const model_ids ids = model_prompt(400, 2048);
    const std::vector<float> want[] = {session_cold(model_shipped, session_first(ids, 150), "f16"),
                                       session_cold(model_shipped, session_first(ids, 290), "f16")};
    std::atomic<bool> stop{false};
    std::mutex gate; // guards `victim`, which is a living session or NULL
    engine_session *victim = nullptr;
    std::atomic<int> cancelled{0}, done{0};
    const auto be_victim = [&](engine_session *s) {
        std::lock_guard<std::mutex> lock(gate);
        victim = s;
    };
    const auto work = [&](int no) {
        std::mt19937 random{unsigned(no)};
        temp_file dir;
        while (!stop) {
            open_session s(m.m, 512, 64);
            if (no == 0)
                be_victim(s.s);
            for (int i = 0; i < 8 && !stop; i++) {
                const size_t n = random() % 2 ? 150 : 290;
                int r = engine_sync(s.s, ids.data(), n, &s.err);
                if (r == ENGINE_ECANCELLED) {
                    cancelled++;
                    continue;
                }
                const float *logits = nullptr;
                r = r < 0 ? r : engine_logits(s.s, &logits, &s.err);
                if (r == ENGINE_ECANCELLED) {
                    cancelled++;
                    continue;
                }
                ASSERT_GT(r, 0) << s.err.msg;
                ASSERT_TRUE(std::equal(logits, logits + 2048, want[n == 290].begin())) << "thread " << no;
                engine_rewind(s.s, random() % n, nullptr);
                if (i == 4) {
                    engine_save(s.s, dir.file.c_str(), nullptr);
                    engine_load(s.s, dir.file.c_str(), nullptr);
                }
                done++;
            }
            if (no == 0)
                be_victim(nullptr);
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back(work, i);
    const double start = now_seconds();
    while (now_seconds() - start < seconds) {
        usleep(3000);
        std::lock_guard<std::mutex> lock(gate);
        engine_cancel(victim);
    }
    stop = true;
    for (std::thread &t : threads)
        t.join();
    EXPECT_GT(cancelled, 0);
    EXPECT_GT(done, 0);
}

TEST(Basics, Sha256EqualsThePublishedValues) {
    // FIPS 180-4 examples, and a million times 'a'.
    const auto hex = [](const std::string &text) {
        sha256 h;
        for (size_t i = 0, n; i < text.size(); i += n)
            h.add(text.data() + i, n = std::min<size_t>(text.size() - i, 1 + i % 130));
        std::string out;
        for (uint8_t b : h.finish().b)
            out += strf("%02x", b);
        return out;
    };
    EXPECT_EQ(hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(hex(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}
