// Sampling: llama.cpp's own samplers, a naive reference, distributions, bounds, and settings from metadata.
#include "unit.h"

#include "gguf_writer.h"

#include <dlfcn.h>
#include <glob.h>
#include <map>
#include <random>
#include <set>

namespace {

typedef std::vector<float> smp_floats;
typedef std::vector<int32_t> smp_ids;
typedef std::set<int32_t> smp_set;

const std::string smp_model = test::root_path("models/tiny-chat-q8_0.gguf");

// Tokens with these texts.
struct smp_vocab {
    std::vector<std::string> texts;
    vocab v;
    explicit smp_vocab(const std::vector<std::string> &t) : texts(t) {
        v.n = int(texts.size());
        v.type.assign(texts.size(), TOKEN_NORMAL);
        for (const std::string &s : texts)
            v.text.push_back(s);
    }
    explicit smp_vocab(size_t n) : smp_vocab(std::vector<std::string>(n, "x")) {}
    smp_vocab(const smp_vocab &) = delete;
};

// With defaults filled in, as the API does it.
engine_sampling smp_checked(const engine_sampling &o, const vocab &v) { return check_sampling(&o, v); }

smp_set smp_pick(const sampler_room &room) {
    smp_set ids;
    for (size_t i = 0; i < room.pick.size(); i++) {
        ids.insert(room.pick[i].id);
        EXPECT_TRUE(i == 0 || room.pick[i - 1].id < room.pick[i].id);
    }
    return ids;
}

smp_set smp_survivors(const smp_floats &logits, const engine_sampling &o, const vocab &v, const smp_ids &timeline,
                      sampler_room &room) {
    narrow(logits, smp_checked(o, v), v, timeline, room);
    return smp_pick(room);
}

std::map<int32_t, int> smp_draws(const smp_floats &logits, engine_sampling o, int n) {
    smp_vocab v(logits.size());
    o = smp_checked(o, v.v);
    std::map<int32_t, int> count;
    sampler_room room;
    smp_ids timeline;
    for (int i = 0; i < n; i++) {
        count[sample(logits, o, v.v, timeline, room)]++;
        timeline.push_back(0);
    }
    return count;
}

// ---- a naive reference: full sorts, double precision, brute force -----------------------------------------------

// DRY's longest repetition for each next token, straight from its definition.
std::map<int32_t, int> smp_repeats(const engine_sampling &o, const vocab &v, const smp_ids &timeline) {
    const size_t n = timeline.size();
    const size_t begin = o.dry_last_n > 0 && size_t(o.dry_last_n) < n ? n - size_t(o.dry_last_n) : 0;
    std::string text;
    std::vector<size_t> ends; // of each token
    for (int32_t id : timeline) {
        text += std::string(v.text[size_t(id)]);
        ends.push_back(text.size());
    }
    size_t last = 0; // where the last breaker ends
    for (size_t b = 0; b < o.n_dry_breakers; b++) {
        const std::string breaker = o.dry_breakers[b];
        const size_t at = text.rfind(breaker);
        if (at != std::string::npos)
            last = std::max(last, at + breaker.size());
    }
    size_t after = 0; // tokens behind it
    while (after < n && (after + 1 == n ? last == 0 : ends[n - 2 - after] >= last))
        after++;
    std::map<int32_t, int> longest;
    for (size_t i = begin + 1; i < n; i++) { // what comes before token i against what comes before the end
        size_t k = 0;
        while (k < after && i >= begin + k + 1 && timeline[i - 1 - k] == timeline[n - 1 - k])
            k++;
        bool breaks = false;
        for (size_t b = 0; b < o.n_dry_breakers; b++)
            breaks |= std::string(v.text[size_t(timeline[i])]).find(o.dry_breakers[b]) != std::string::npos;
        if (k >= size_t(o.dry_allowed_length) && !breaks)
            longest[timeline[i]] = std::max(longest[timeline[i]], int(k));
    }
    return longest;
}

std::vector<double> smp_adjusted(const smp_floats &logits, const engine_sampling &o, const vocab &v,
                                 const smp_ids &timeline) {
    std::vector<double> l(logits.begin(), logits.end());
    for (size_t i = 0; i < o.n_bias; i++)
        l[size_t(o.bias[i].id)] += double(o.bias[i].bias);
    std::map<int32_t, int> count;
    for (size_t i = 0; i < timeline.size(); i++)
        if (o.penalty_last_n < 0 || timeline.size() - i <= size_t(o.penalty_last_n))
            count[timeline[i]]++;
    for (const auto &c : count) {
        double &x = l[size_t(c.first)];
        if (o.repeat_penalty != 0)
            x = x > 0 ? x / double(o.repeat_penalty) : x * double(o.repeat_penalty);
        x -= c.second * double(o.frequency_penalty) + double(o.presence_penalty);
    }
    if (o.dry_multiplier > 0)
        for (const auto &r : smp_repeats(o, v, timeline))
            l[size_t(r.first)] -=
                double(o.dry_multiplier) * std::pow(double(o.dry_base), r.second - o.dry_allowed_length);
    return l;
}

struct smp_reference {
    std::vector<int32_t> ids; // what is left
    double margin = 1;        // how far the nearest decision was from being another one

    // probabilities of what is left
    std::vector<double> shares(const std::vector<double> &l) const {
        std::vector<double> p;
        double best = -HUGE_VAL, sum = 0;
        for (int32_t id : ids)
            best = std::max(best, l[size_t(id)]);
        for (int32_t id : ids)
            p.push_back(std::exp(l[size_t(id)] - best)), sum += p.back();
        for (double &x : p)
            x /= sum;
        return p;
    }
    // keeps the first ones, in order of key and id, that make up `part`
    void keep(const std::vector<double> &l, const std::vector<double> &key, double part) {
        const std::vector<double> p = shares(l);
        std::vector<size_t> order(ids.size());
        for (size_t i = 0; i < order.size(); i++)
            order[i] = i;
        std::sort(order.begin(), order.end(),
                  [&](size_t a, size_t b) { return key[a] != key[b] ? key[a] < key[b] : ids[a] < ids[b]; });
        std::vector<int32_t> kept;
        double sum = 0;
        for (size_t i = 0; i < order.size() && (kept.empty() || sum < part); i++) {
            kept.push_back(ids[order[i]]);
            sum += p[order[i]];
            margin = std::min(margin, std::fabs(sum - part));
            if (i + 1 < order.size() && key[order[i]] != key[order[i + 1]])
                margin = std::min(margin, key[order[i + 1]] - key[order[i]]);
        }
        std::sort(kept.begin(), kept.end());
        ids = kept;
    }
    smp_reference(const std::vector<double> &l, const engine_sampling &o, bool xtc) {
        for (size_t i = 0; i < l.size(); i++)
            if (l[i] > -HUGE_VAL)
                ids.push_back(int32_t(i));
        if (o.top_k > 0) {
            const auto by_logit = [&](int32_t a, int32_t b) {
                return l[size_t(a)] != l[size_t(b)] ? l[size_t(a)] > l[size_t(b)] : a < b;
            };
            std::sort(ids.begin(), ids.end(), by_logit);
            ids.resize(std::min(ids.size(), size_t(o.top_k)));
            std::sort(ids.begin(), ids.end());
        }
        if (o.typical_p > 0 && o.typical_p < 1) {
            const std::vector<double> p = shares(l);
            double entropy = 0;
            for (double x : p)
                entropy -= x > 0 ? x * std::log(x) : 0;
            std::vector<double> key;
            for (double x : p)
                key.push_back(std::fabs(-std::log(x) - entropy));
            keep(l, key, double(o.typical_p));
        }
        if (o.top_p > 0 && o.top_p < 1) {
            std::vector<double> key;
            for (int32_t id : ids)
                key.push_back(-l[size_t(id)]);
            keep(l, key, double(o.top_p));
        }
        const auto drop = [&](auto &&gone) {
            const std::vector<double> p = shares(l);
            std::vector<int32_t> kept;
            for (size_t i = 0; i < ids.size(); i++)
                if (!gone(p, i))
                    kept.push_back(ids[i]);
            ids = kept;
        };
        if (o.min_p > 0)
            drop([&](const std::vector<double> &p, size_t i) {
                const double most = *std::max_element(p.begin(), p.end());
                if (p[i] < most)
                    margin = std::min(margin, std::fabs(p[i] / most - double(o.min_p)));
                return p[i] < double(o.min_p) * most && p[i] < most;
            });
        if (xtc)
            drop([&](const std::vector<double> &p, size_t i) {
                margin = std::min(margin, std::fabs(p[i] - double(o.xtc_threshold)));
                bool worse = false; // another viable one is less likely
                for (size_t j = 0; j < p.size(); j++)
                    worse |= p[j] >= double(o.xtc_threshold) && (p[j] < p[i] || (p[j] == p[i] && j > i));
                return p[i] >= double(o.xtc_threshold) && worse;
            });
    }
};

struct smp_random {
    std::mt19937_64 engine;
    explicit smp_random(uint64_t seed) : engine(seed) {}
    int below(int n) { return int(engine() % uint64_t(n)); }
    float real(float lo, float hi) { return lo + (hi - lo) * float(engine() >> 40) * 0x1p-24f; }
    bool often(int percent) { return below(100) < percent; }
    // Logits of very different sharpness; with `ties` many are equal.
    smp_floats logits(size_t n, bool ties) {
        const float scale = std::pow(10.0f, real(-1.5f, 1.3f));
        smp_floats l(n);
        for (float &x : l)
            x = ties ? float(below(6)) * scale : (real(-1, 1) + real(-1, 1) + real(-1, 1)) * scale;
        return l;
    }
    engine_sampling filters(size_t n) {
        engine_sampling o = {};
        o.temperature = 1;
        o.top_k = often(50) ? 1 + below(int(n) + 3) : 0;
        o.typical_p = often(40) ? real(0.02f, 1) : 0;
        o.top_p = often(50) ? real(0.02f, 1) : 0;
        o.min_p = often(40) ? real(0, 1) * real(0, 1) : 0;
        o.xtc_probability = often(40) ? 1 : 0;
        o.xtc_threshold = real(0.01f, 0.5f);
        return o;
    }
    // Text that repeats itself.
    smp_ids timeline(size_t n, int n_vocab) {
        smp_ids t;
        while (t.size() < n) {
            const size_t length = size_t(1 + below(12));
            const size_t from = t.empty() ? 0 : size_t(below(int(t.size())));
            const bool copy = often(60);
            for (size_t i = 0; i < length && t.size() < n; i++)
                t.push_back(copy && from + i < t.size() ? t[from + i] : below(n_vocab));
        }
        return t;
    }
};

// ---- llama.cpp's samplers, from the npm package node-llama-cpp ---------------------------------------------------

struct smp_llama_token {
    int32_t id;
    float logit, p;
};
struct smp_llama_tokens {
    smp_llama_token *data;
    size_t size;
    int64_t selected;
    bool sorted;
};
struct smp_llama {
    void *library = nullptr;
    void (*apply)(void *, smp_llama_tokens *);
    void (*accept)(void *, int32_t);
    void (*release)(void *);
    void *(*top_k)(int32_t);
    void *(*top_p)(float, size_t);
    void *(*min_p)(float, size_t);
    void *(*typical)(float, size_t);
    void *(*xtc)(float, float, size_t, uint32_t);
    void *(*penalties)(int32_t, int32_t, float, float, float);
    void *(*logit_bias)(int32_t, int32_t, const engine_logit_bias *);
    void *(*dry)(float, float, int32_t, int32_t, const std::vector<std::vector<int32_t>> &);

    template <class T> void find(T &fn, const char *name) {
        fn = reinterpret_cast<T>(dlsym(library, name));
        EXPECT_TRUE(fn) << name;
    }
    smp_llama() {
        const std::string pattern =
            test::root_path("tests/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64/libllama.*so*");
        glob_t found = {};
        if (glob(pattern.c_str(), 0, nullptr, &found) == 0)
            library = dlopen(found.gl_pathv[0], RTLD_NOW | RTLD_LOCAL);
        globfree(&found);
        if (!library)
            return;
        find(apply, "llama_sampler_apply"), find(accept, "llama_sampler_accept"), find(release, "llama_sampler_free");
        find(top_k, "llama_sampler_init_top_k"), find(top_p, "llama_sampler_init_top_p");
        find(min_p, "llama_sampler_init_min_p"), find(typical, "llama_sampler_init_typical");
        find(xtc, "llama_sampler_init_xtc"), find(penalties, "llama_sampler_init_penalties");
        find(logit_bias, "llama_sampler_init_logit_bias");
        find(dry, "_Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE");
    }
    void step(void *sampler, std::vector<smp_llama_token> &t, const smp_ids &timeline = {}) const {
        for (int32_t id : timeline)
            accept(sampler, id);
        smp_llama_tokens all = {t.data(), t.size(), -1, false};
        apply(sampler, &all);
        t = std::vector<smp_llama_token>(all.data, all.data + all.size);
        release(sampler);
    }
};

TEST(Sampler, FiltersEqualLlamaCpp) {
    const smp_llama llama;
    if (!llama.library)
        GTEST_SKIP() << "[npm] no node-llama-cpp";
    smp_random r(1);
    sampler_room room;
    int compared = 0, cut = 0;
    for (int round = 0; round < 4000; round++) {
        const size_t n = size_t(2 + r.below(60));
        const smp_floats logits = r.logits(n, false);
        const smp_vocab v(n);
        const engine_sampling o = r.filters(n);
        const bool xtc = o.xtc_probability > 0;
        const smp_reference ref(std::vector<double>(logits.begin(), logits.end()), o, xtc);
        std::vector<smp_llama_token> t;
        for (size_t i = 0; i < n; i++)
            t.push_back({int32_t(i), logits[i], 0});
        if (o.top_k > 0)
            llama.step(llama.top_k(o.top_k), t);
        if (o.typical_p > 0)
            llama.step(llama.typical(o.typical_p, 1), t);
        if (o.top_p > 0)
            llama.step(llama.top_p(o.top_p, 1), t);
        if (o.min_p > 0)
            llama.step(llama.min_p(o.min_p, 1), t);
        if (xtc)
            llama.step(llama.xtc(1, o.xtc_threshold, 1, 7), t);
        smp_set theirs;
        for (const smp_llama_token &x : t)
            theirs.insert(x.id);
        if (ref.margin < 1e-4) // it computes in float
            continue;
        compared++;
        cut += theirs.size() < n;
        ASSERT_EQ(smp_survivors(logits, o, v.v, {}, room), theirs)
            << "round " << round << " k " << o.top_k << " typical " << o.typical_p << " p " << o.top_p << " min "
            << o.min_p << " xtc " << xtc << " " << o.xtc_threshold;
    }
    EXPECT_GT(compared, 3000);
    EXPECT_GT(cut, 2000);
}

TEST(Sampler, LogitsEqualLlamaCpp) {
    const smp_llama llama;
    if (!llama.library)
        GTEST_SKIP() << "[npm] no node-llama-cpp";
    smp_random r(2);
    // The breakers are token 0, and 1 followed by 2.
    const smp_vocab v({"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"});
    const char *breakers[] = {"a", "bc"};
    const std::vector<std::vector<int32_t>> their_breakers = {{0}, {1, 2}};
    int changed = 0;
    for (int round = 0; round < 3000; round++) {
        const smp_floats logits = r.logits(10, false);
        const smp_ids timeline = r.timeline(size_t(1 + r.below(80)), 2 + r.below(9));
        engine_sampling o = {};
        o.penalty_last_n = 1 + r.below(100);
        o.repeat_penalty = r.often(50) ? r.real(0.5f, 2) : 0;
        o.frequency_penalty = r.often(50) ? r.real(-1, 1) : 0;
        o.presence_penalty = r.often(50) ? r.real(-1, 1) : 0;
        o.dry_multiplier = r.often(70) ? r.real(0.1f, 2) : 0;
        o.dry_base = r.real(1, 3);
        o.dry_allowed_length = 1 + r.below(4);
        o.dry_last_n = 1 + r.below(100);
        o.dry_breakers = breakers, o.n_dry_breakers = 2;
        std::vector<engine_logit_bias> bias;
        while (r.often(40))
            bias.push_back({r.below(9), r.often(20) ? -INFINITY : r.real(-3, 3)});
        o.bias = bias.data(), o.n_bias = bias.size();
        std::vector<smp_llama_token> t;
        for (int32_t i = 0; i < 10; i++)
            t.push_back({i, logits[size_t(i)], 0});
        llama.step(llama.logit_bias(10, int32_t(bias.size()), bias.data()), t);
        llama.step(llama.penalties(10, o.penalty_last_n, o.repeat_penalty > 0 ? o.repeat_penalty : 1,
                                   o.frequency_penalty, o.presence_penalty),
                   t, timeline);
        if (o.dry_multiplier > 0)
            llama.step(llama.dry(o.dry_multiplier, o.dry_base, o.dry_allowed_length, o.dry_last_n, their_breakers), t,
                       timeline);
        sampler_room room;
        const smp_floats ours = adjust_logits(logits, smp_checked(o, v.v), v.v, timeline, room);
        ASSERT_EQ(t.size(), ours.size());
        for (const smp_llama_token &x : t) {
            const float l = ours[size_t(x.id)];
            if (std::isinf(x.logit))
                ASSERT_EQ(l, x.logit);
            else
                ASSERT_NEAR(l, x.logit, 1e-4f * (1 + std::fabs(x.logit))) << "round " << round << " token " << x.id;
            changed += l != logits[size_t(x.id)];
        }
    }
    EXPECT_GT(changed, 10000);
}

// ---- against the naive reference --------------------------------------------------------------------------------

TEST(Sampler, EqualsTheNaiveReference) {
    smp_random r(3);
    const smp_vocab v({"a", "b", "c",  "d",  "e",  "f",  "g",  "h", "i",  "j", "k",   "l", "m",  "n",
                       "o", "p", "ab", "cd", "ef", "gh", "\n", ":", "\"", "*", "x*y", "",  "zz", "z"});
    const size_t n = v.texts.size();
    sampler_room room; // one for all: nothing of one call may show in the next
    int compared = 0;
    for (int round = 0; round < 6000; round++) {
        const bool ties = r.often(30);
        const smp_floats logits = r.logits(n, ties);
        const smp_ids timeline = r.timeline(size_t(r.below(70)), 2 + r.below(int(n) - 1));
        engine_sampling o = r.filters(n);
        std::vector<engine_logit_bias> bias;
        while (r.often(50))
            bias.push_back({r.below(int(n)), r.often(30) ? -INFINITY : r.real(-3, 3)});
        o.bias = bias.data(), o.n_bias = bias.size();
        if (r.often(50)) {
            o.penalty_last_n = r.below(5) - 1;
            o.repeat_penalty = r.real(0.5f, 2);
            o.frequency_penalty = r.real(-1, 1), o.presence_penalty = r.real(-1, 1);
        }
        if (r.often(50)) {
            o.dry_multiplier = r.real(0.1f, 2);
            o.dry_last_n = r.below(40) - 1;
            o.dry_allowed_length = r.below(4);
        }
        o = smp_checked(o, v.v);
        const std::vector<double> l = smp_adjusted(logits, o, v.v, timeline);
        const smp_reference ref(l, o, o.xtc_probability > 0);
        std::vector<double> sorted(l); // nearly equal logits may be rounded to equal ones, or the other way
        std::sort(sorted.begin(), sorted.end());
        double gap = 1;
        for (size_t i = 1; i < n; i++)
            if (sorted[i] - sorted[i - 1] > (ties ? 0 : -1) && sorted[i - 1] > -HUGE_VAL)
                gap = std::min(gap, sorted[i] - sorted[i - 1]);
        if (gap < 1e-5 || ref.margin < 1e-5)
            continue;
        compared++;
        narrow(logits, o, v.v, timeline, room);
        ASSERT_EQ(smp_pick(room), smp_set(ref.ids.begin(), ref.ids.end()))
            << "round " << round << " k " << o.top_k << " typical " << o.typical_p << " p " << o.top_p << " min "
            << o.min_p << " xtc " << o.xtc_probability << " " << o.xtc_threshold;
        engine_sampling greedy = o;
        greedy.temperature = 0;
        ASSERT_EQ(sample(logits, greedy, v.v, timeline, room), std::max_element(l.begin(), l.end()) - l.begin());
    }
    EXPECT_GT(compared, 4000);
}

TEST(Sampler, RepeatsEqualBruteForce) {
    smp_random r(4);
    const smp_vocab v({"a", "b", "c", "ab", "bca", "", "d", "cc"});
    const char *const breakers[] = {"d", "cab", "aaaa", "bb", "cccc"};
    int found = 0, limited = 0;
    for (int round = 0; round < 8000; round++) {
        const smp_ids timeline = r.timeline(size_t(r.below(120)), 1 + r.below(8));
        engine_sampling o = {};
        o.dry_multiplier = 1, o.dry_base = 1.5f;
        o.dry_allowed_length = 1 + r.below(5);
        o.dry_last_n = r.below(3) ? r.below(130) : -1;
        o.dry_breakers = breakers, o.n_dry_breakers = size_t(r.below(6));
        o = smp_checked(o, v.v);
        sampler_room room;
        const smp_floats zero(8, 0.0f);
        const smp_floats got = adjust_logits(zero, o, v.v, timeline, room);
        smp_floats want = zero;
        for (const auto &x : smp_repeats(o, v.v, timeline)) {
            want[size_t(x.first)] = float(-std::pow(1.5, x.second - o.dry_allowed_length));
            found++;
        }
        for (size_t i = 0; i < 8; i++)
            ASSERT_NEAR(got[i], want[i], 1e-5 * std::fabs(double(want[i]))) << "round " << round << " token " << i;
        engine_sampling free = o;
        free.n_dry_breakers = 0;
        limited += smp_repeats(free, v.v, timeline) != smp_repeats(o, v.v, timeline);
    }
    EXPECT_GT(found, 5000);
    EXPECT_GT(limited, 1000);
}

TEST(Sampler, FiltersKeepWhatTheyPromise) {
    // probabilities 0.4, 0.3, 0.2, 0.1 in another order
    const smp_floats logits = {std::log(0.2f), std::log(0.4f), std::log(0.1f), std::log(0.3f)};
    const smp_vocab v(4);
    sampler_room room;
    const auto kept = [&](int top_k, float top_p, float min_p, float typical = 0, float xtc = 0) {
        engine_sampling o = {};
        o.temperature = 1;
        o.top_k = top_k, o.top_p = top_p, o.min_p = min_p, o.typical_p = typical;
        o.xtc_probability = xtc > 0 ? 1 : 0, o.xtc_threshold = xtc;
        return smp_survivors(logits, o, v.v, {}, room);
    };
    EXPECT_EQ(kept(0, 0, 0), (smp_set{0, 1, 2, 3}));
    EXPECT_EQ(kept(2, 0, 0), (smp_set{1, 3}));
    EXPECT_EQ(kept(9, 0, 0), (smp_set{0, 1, 2, 3}));
    EXPECT_EQ(kept(0, 0.35f, 0), (smp_set{1}));
    EXPECT_EQ(kept(0, 0.65f, 0), (smp_set{1, 3}));
    EXPECT_EQ(kept(0, 0.75f, 0), (smp_set{0, 1, 3}));
    EXPECT_EQ(kept(0, 0, 0.3f), (smp_set{0, 1, 3}));
    EXPECT_EQ(kept(0, 0, 1), (smp_set{1}));
    // top-p counts what top-k left: 0.4/0.9 is below 0.5, and 0.7/0.9 above
    EXPECT_EQ(kept(3, 0.5f, 0), (smp_set{1, 3}));
    // min-p comes after top-p: it does not change what top-p sees
    EXPECT_EQ(kept(0, 0.95f, 0.6f), (smp_set{1, 3}));
    EXPECT_EQ(kept(0, 0.65f, 0.3f), (smp_set{1, 3}));
    EXPECT_EQ(kept(3, 0.85f, 0.6f), (smp_set{1, 3}));
    // The expected surprise is 1.28: 0.3 (1.20) is nearest, then 0.2 (1.61), 0.4 (0.92) and 0.1 (2.30).
    EXPECT_EQ(kept(0, 0, 0, 0.25f), (smp_set{3}));
    EXPECT_EQ(kept(0, 0, 0, 0.45f), (smp_set{0, 3}));
    EXPECT_EQ(kept(0, 0, 0, 0.85f), (smp_set{0, 1, 3}));
    // XTC: the least likely of those that reach the threshold stays, with all below it; one alone is not dropped.
    EXPECT_EQ(kept(0, 0, 0, 0, 0.15f), (smp_set{0, 2}));
    EXPECT_EQ(kept(0, 0, 0, 0, 0.25f), (smp_set{0, 2, 3}));
    EXPECT_EQ(kept(0, 0, 0, 0, 0.35f), (smp_set{0, 1, 2, 3}));
    EXPECT_EQ(kept(0, 0, 0, 0, 0.5f), (smp_set{0, 1, 2, 3}));
}

TEST(Sampler, EqualLogitsAreOrderedById) {
    EXPECT_EQ(smp_draws({1, 3, 3, 2}, {}, 3), (std::map<int32_t, int>{{1, 3}}));
    const smp_floats flat(1000, 2.5f);
    const smp_vocab v(1000);
    sampler_room room;
    engine_sampling o = {};
    o.temperature = 1;
    o.top_k = 3;
    EXPECT_EQ(smp_survivors(flat, o, v.v, {}, room), (smp_set{0, 1, 2}));
    o.top_k = 0, o.top_p = 0.0025f;
    EXPECT_EQ(smp_survivors(flat, o, v.v, {}, room), (smp_set{0, 1, 2}));
    o.top_p = 0, o.typical_p = 0.0025f;
    EXPECT_EQ(smp_survivors(flat, o, v.v, {}, room), (smp_set{0, 1, 2}));
    o.typical_p = 0, o.top_p = 3 / 1024.0f; // exactly three of them
    EXPECT_EQ(smp_survivors(smp_floats(1024, 0), o, v.v, {}, room), (smp_set{0, 1, 2}));
    o.top_p = 0, o.top_k = 4, o.xtc_probability = 1, o.xtc_threshold = 0.2f;
    EXPECT_EQ(smp_survivors(flat, o, v.v, {}, room), (smp_set{3}));
}

TEST(Sampler, OrderOfTheLogitsDoesNotMatter) {
    smp_random r(5);
    const size_t n = 300;
    const smp_vocab v(n);
    sampler_room room;
    for (int round = 0; round < 300; round++) {
        const smp_floats logits = r.logits(n, false);
        if (std::set<float>(logits.begin(), logits.end()).size() < n)
            continue;
        std::vector<int32_t> to(n);
        for (size_t i = 0; i < n; i++)
            to[i] = int32_t(i);
        std::shuffle(to.begin(), to.end(), r.engine);
        smp_floats moved(n);
        for (size_t i = 0; i < n; i++)
            moved[size_t(to[i])] = logits[i];
        engine_sampling o = r.filters(n);
        o.typical_p = 0; // its order follows from a sum over all, which rounds
        smp_set want;
        for (int32_t id : smp_survivors(logits, o, v.v, {}, room))
            want.insert(to[size_t(id)]);
        EXPECT_EQ(smp_survivors(moved, o, v.v, {}, room), want) << round;
    }
}

TEST(Sampler, WeightIsTheExponential) {
    for (int i = 0; i < 200000; i++) {
        const double x = -690.0 * i / 200000, want = std::exp(x);
        ASSERT_NEAR(weight(x), want, 1e-15 * want) << x;
    }
    EXPECT_EQ(weight(0), 1);
    EXPECT_EQ(weight(-HUGE_VAL), 0);
    EXPECT_EQ(weight(-1e300), 0);
}

// ---- distributions ----------------------------------------------------------------------------------------------

// Six standard deviations above what is expected.
void smp_expect_chi2(double chi2, double freedom, const std::string &what) {
    EXPECT_LT(chi2, freedom + 6 * std::sqrt(2 * freedom)) << what;
}

TEST(Sampler, FrequenciesFollowTheTemperature) {
    smp_random r(6);
    const int n = 40000;
    for (float temperature : {0.3f, 0.8f, 1.0f, 2.0f, 1000.0f})
        for (int round = 0; round < 3; round++) {
            const smp_floats logits = [&] {
                smp_floats l(12);
                for (float &x : l)
                    x = r.real(-1.5f, 1.5f);
                return l;
            }();
            engine_sampling o = {};
            o.temperature = temperature;
            o.seed = uint64_t(round);
            double z = 0, chi2 = 0;
            for (float l : logits)
                z += std::exp(double(l) / double(temperature));
            auto count = smp_draws(logits, o, n);
            for (size_t i = 0; i < logits.size(); i++) {
                const double expected = n * std::exp(double(logits[i]) / double(temperature)) / z;
                chi2 += std::pow(count[int32_t(i)] - expected, 2) / expected;
            }
            smp_expect_chi2(chi2, 11, "temperature " + std::to_string(temperature));
        }
}

TEST(Sampler, FrequenciesAfterFilters) {
    // 0.4, 0.3, 0.2, 0.1: top-k and top-p leave the first three, of which XTC leaves 0.2 in a third of the draws.
    const smp_floats logits = {std::log(0.4f), std::log(0.3f), std::log(0.2f), std::log(0.1f)};
    engine_sampling o = {};
    o.temperature = 1, o.top_k = 3, o.top_p = 0.99f, o.min_p = 0.05f;
    o.xtc_probability = 1 / 3.0f, o.xtc_threshold = 0.15f;
    const int n = 60000;
    auto count = smp_draws(logits, o, n);
    const double expected[] = {n * 2 / 3.0 * 4 / 9, n * 2 / 3.0 * 3 / 9, n * (1 / 3.0 + 2 / 3.0 * 2 / 9)};
    double chi2 = 0;
    for (int i = 0; i < 3; i++)
        chi2 += std::pow(count[i] - expected[i], 2) / expected[i];
    smp_expect_chi2(chi2, 2, "with XTC");
    EXPECT_EQ(count.count(3), 0u);
}

TEST(Sampler, TheTwoDrawsAreIndependentAndUniform) {
    for (uint64_t seed : {uint64_t(0), uint64_t(1), uint64_t(2), ~uint64_t(0), uint64_t(123456789)}) {
        std::vector<double> cells(100, 0), next(100, 0);
        const int n = 100000;
        for (int i = 0; i < n; i++) {
            const double token = draw(seed, uint64_t(i)), xtc = draw(scramble(~seed), uint64_t(i));
            const double after = draw(seed, uint64_t(i) + 1);
            ASSERT_TRUE(token >= 0 && token < 1 && xtc >= 0 && xtc < 1);
            cells[size_t(token * 10) * 10 + size_t(xtc * 10)]++;
            next[size_t(token * 10) * 10 + size_t(after * 10)]++;
        }
        for (const auto &table : {cells, next}) {
            double chi2 = 0;
            for (double c : table)
                chi2 += std::pow(c - n / 100.0, 2) / (n / 100.0);
            smp_expect_chi2(chi2, 99, "seed " + std::to_string(seed));
        }
    }
}

TEST(Sampler, SeedAndPositionDecide) {
    smp_floats logits(1000);
    for (size_t i = 0; i < logits.size(); i++)
        logits[i] = float(i % 7);
    const smp_vocab v(1000);
    sampler_room room, other;
    engine_sampling o = {};
    o.temperature = 1;
    o.xtc_probability = 0.5f, o.xtc_threshold = 0.001f;
    smp_random r(7);
    int same_seed = 0, same_position = 0;
    for (size_t i = 0; i < 200; i++) {
        o.seed = 1;
        const engine_sampling one = smp_checked(o, v.v);
        const int32_t a = sample(logits, one, v.v, smp_ids(i, 0), room);
        EXPECT_EQ(a, sample(logits, one, v.v, r.timeline(i, 1000), other)) << "what the timeline holds does not matter";
        same_seed += a == sample(logits, one, v.v, smp_ids(i + 1000, 0), room);
        o.seed = 2;
        same_position += a == sample(logits, smp_checked(o, v.v), v.v, smp_ids(i, 0), room);
    }
    EXPECT_LT(same_seed, 20);
    EXPECT_LT(same_position, 20);
}

// ---- bans, extremes, bounds -------------------------------------------------------------------------------------

TEST(Sampler, BannedTokensNeverComeOut) {
    smp_random r(8);
    const size_t n = 40;
    const smp_vocab v(n);
    sampler_room room;
    for (int round = 0; round < 2000; round++) {
        const smp_floats logits = r.logits(n, r.often(30));
        smp_set allowed;
        std::vector<engine_logit_bias> bias;
        const int percent = r.below(101);
        const int32_t spared = r.below(int(n));
        for (int32_t i = 0; i < int32_t(n); i++)
            if (i == spared || r.often(percent))
                allowed.insert(i);
            else {
                bias.push_back({i, -INFINITY});
                if (r.often(30)) // more biases cannot lift a ban
                    bias.insert(r.often(50) ? bias.begin() : bias.end(), {i, 3e38f});
            }
        engine_sampling o = r.filters(n);
        o.temperature = r.often(20) ? 0 : r.real(0.01f, 5);
        o.seed = r.engine();
        o.repeat_penalty = r.real(0.1f, 3), o.presence_penalty = r.real(-100, 100);
        o.dry_multiplier = r.often(50) ? 1000 : 0;
        o.bias = bias.data(), o.n_bias = bias.size();
        const int32_t id = sample(logits, smp_checked(o, v.v), v.v, r.timeline(size_t(r.below(60)), int(n)), room);
        ASSERT_TRUE(allowed.count(id)) << "round " << round << " token " << id;
    }
}

TEST(Sampler, ExtremeValuesStillChoose) {
    const float most = 3.40282347e38f;
    const smp_vocab v(5);
    sampler_room room;
    const engine_logit_bias bias[] = {{0, most}, {0, most}, {1, -most}, {1, -most}, {4, 1e-45f}};
    const smp_ids timeline(400, 3);
    for (const smp_floats &logits :
         {smp_floats{most, most, most, most, most}, smp_floats{-most, -most, -most, -most, -most},
          smp_floats{most, -most, 0, 1e-45f, -0.0f}, smp_floats{0, 0, 0, 0, 0}, smp_floats{1, 2, 3, 4, 5}})
        for (float temperature : {0.0f, 1e-45f, 1e-30f, 1.0f, 1000.0f})
            for (int mask = 0; mask < 128; mask++) {
                engine_sampling o = {};
                o.temperature = temperature;
                o.top_k = mask & 1 ? 3 : 0;
                o.typical_p = mask & 2 ? 1e-45f : 0;
                o.top_p = mask & 4 ? (mask & 64 ? 0.99999994f : 1e-45f) : 0;
                o.min_p = mask & 8 ? (mask & 64 ? 1 : 1e-45f) : 0;
                o.xtc_probability = 1, o.xtc_threshold = mask & 16 ? 1e-45f : 0.5f;
                o.penalty_last_n = -1;
                o.repeat_penalty = mask & 32 ? 100 : 1e-45f;
                o.frequency_penalty = 100, o.presence_penalty = -100;
                o.dry_multiplier = 1000, o.dry_base = mask & 16 ? 100 : 1, o.dry_allowed_length = 1;
                if (mask & 64)
                    o.bias = bias, o.n_bias = 5;
                const int32_t id = sample(logits, smp_checked(o, v.v), v.v, timeline, room);
                ASSERT_TRUE(id >= 0 && id < 5) << mask;
                for (float l : room.logits)
                    ASSERT_TRUE(std::isfinite(l)) << mask;
            }
    // the highest temperature is nearly uniform, the lowest takes the best
    engine_sampling o = {};
    o.temperature = 1e-45f;
    EXPECT_EQ(smp_draws({1, 2, 3, 2.9999998f}, o, 50), (std::map<int32_t, int>{{2, 50}}));
}

TEST(Sampler, OptionsOutOfRangeAreNamed) {
    const smp_vocab v(10);
    const auto message = [&](const engine_sampling &o) {
        engine_error err = {};
        guarded(&err, [&] { return check_sampling(&o, v.v), 0; });
        EXPECT_TRUE(err.code == 0 || err.code == ENGINE_EINVAL) << err.msg;
        return std::string(err.msg);
    };
    const struct {
        const char *name;
        float engine_sampling::*field;
        float lo, hi;
        bool zero; // is a default of its own
    } reals[] = {
        {"temperature", &engine_sampling::temperature, 0, 1000, false},
        {"top_p", &engine_sampling::top_p, 0, 1, false},
        {"min_p", &engine_sampling::min_p, 0, 1, false},
        {"typical_p", &engine_sampling::typical_p, 0, 1, false},
        {"repeat_penalty", &engine_sampling::repeat_penalty, 0, 100, false},
        {"presence_penalty", &engine_sampling::presence_penalty, -100, 100, false},
        {"frequency_penalty", &engine_sampling::frequency_penalty, -100, 100, false},
        {"dry_multiplier", &engine_sampling::dry_multiplier, 0, 1000, false},
        {"dry_base", &engine_sampling::dry_base, 1, 100, true},
        {"xtc_probability", &engine_sampling::xtc_probability, 0, 1, false},
        {"xtc_threshold", &engine_sampling::xtc_threshold, 0, 0.5f, false},
    };
    for (const auto &f : reals) {
        engine_sampling o = {};
        for (float good : {f.lo, f.hi, 0.0f}) {
            o.*f.field = good;
            EXPECT_EQ(message(o), "") << f.name;
        }
        for (float bad :
             {std::nextafter(f.lo, -2000.0f), std::nextafter(f.hi, 2000.0f), NAN, -NAN, INFINITY, -INFINITY, -1e30f}) {
            o.*f.field = bad;
            EXPECT_EQ(message(o).substr(0, strlen(f.name) + 4), std::string(f.name) + " is ") << f.name << " " << bad;
        }
    }
    const struct {
        const char *name;
        int engine_sampling::*field;
        int lo;
    } wholes[] = {
        {"top_k", &engine_sampling::top_k, 0},
        {"penalty_last_n", &engine_sampling::penalty_last_n, -1},
        {"dry_allowed_length", &engine_sampling::dry_allowed_length, 0},
        {"dry_last_n", &engine_sampling::dry_last_n, -1},
    };
    for (const auto &f : wholes) {
        engine_sampling o = {};
        for (int good : {f.lo, 0, 1, INT_MAX}) {
            o.*f.field = good;
            EXPECT_EQ(message(o), "") << f.name;
        }
        for (int bad : {f.lo - 1, INT_MIN}) {
            o.*f.field = bad;
            EXPECT_EQ(message(o).substr(0, strlen(f.name) + 4), std::string(f.name) + " is ") << f.name;
        }
    }
    const auto with_bias = [&](const std::vector<engine_logit_bias> &b) {
        engine_sampling o = {};
        o.bias = b.data(), o.n_bias = b.size();
        return message(o);
    };
    EXPECT_EQ(with_bias({{9, 1}, {0, -INFINITY}}), "");
    EXPECT_EQ(with_bias({{9, 1}, {10, 1}}), "bias[1].id is 10, expected 0 to 9");
    EXPECT_EQ(with_bias({{-1, 1}}), "bias[0].id is -1, expected 0 to 9");
    EXPECT_EQ(with_bias({{1, INFINITY}}), "bias[0].bias is inf, expected a finite number or -inf");
    EXPECT_NE(with_bias({{1, NAN}}).find("bias[0].bias is "), std::string::npos);
    std::vector<engine_logit_bias> all;
    for (int32_t i = 0; i < 9; i++)
        all.push_back({i, -INFINITY}), all.push_back({i, -INFINITY});
    EXPECT_EQ(with_bias(all), "");
    all.push_back({9, 1e-45f});
    EXPECT_EQ(with_bias(all), "");
    all.push_back({9, -INFINITY});
    EXPECT_EQ(with_bias(all), "bias bans all 10 tokens");
    engine_sampling o = {};
    o.n_bias = 1;
    EXPECT_EQ(message(o), "bias is NULL");
    o = {};
    o.n_dry_breakers = 1;
    EXPECT_EQ(message(o), "dry_breakers is NULL");
    const std::string at_most(256, 'x'), too_long(257, 'x');
    for (const char *bad : {"", static_cast<const char *>(nullptr)}) {
        const char *breakers[] = {"x", bad};
        o.dry_breakers = breakers, o.n_dry_breakers = 2;
        EXPECT_EQ(message(o), "dry_breakers[1] is empty");
    }
    const char *breakers[] = {at_most.c_str(), too_long.c_str()};
    o.dry_breakers = breakers, o.n_dry_breakers = 1;
    EXPECT_EQ(message(o), "");
    o.n_dry_breakers = 2;
    EXPECT_EQ(message(o), "dry_breakers[1] has more than 256 bytes");
}

// ---- cost -------------------------------------------------------------------------------------------------------

// Quadratic work on these would take minutes.
TEST(Sampler, LongTimelines) {
    const size_t n = 100000;
    const smp_vocab v(std::vector<std::string>{"a", "b", "c", "d", "e", ""});
    const char *breakers[] = {"aaaaaaaaaaaaaaaaaaaab", "c"};
    const smp_floats logits(6, 0.0f);
    sampler_room room;
    smp_ids same(n, 0), periodic(n), empty(n, 5), fibonacci = {0, 1};
    for (size_t i = 0; i < n; i++)
        periodic[i] = int32_t(i % 2);
    while (fibonacci.size() < n) { // as many partial repetitions as a text can have
        const size_t half = fibonacci.size();
        smp_ids longer = fibonacci;
        longer.insert(longer.end(), fibonacci.begin(), fibonacci.begin() + std::ptrdiff_t(half * 618 / 1000));
        fibonacci = longer;
    }
    engine_sampling o = {};
    o.penalty_last_n = -1, o.repeat_penalty = 1.1f, o.frequency_penalty = 0.01f;
    o.dry_multiplier = 1;
    o.dry_breakers = breakers, o.n_dry_breakers = 2;
    o = smp_checked(o, v.v);
    for (const smp_ids *timeline : {&same, &periodic, &empty, &fibonacci})
        for (int i = 0; i < 3; i++) {
            const int32_t id = sample(logits, o, v.v, *timeline, room);
            EXPECT_EQ(room.logits[size_t((*timeline)[0])], -3.40282347e38f); // the longest repetition of all
            EXPECT_NE(id, (*timeline)[0]);
        }
}

TEST(Sampler, AllocatesNothingOnceReserved) {
    const size_t n_vocab = 5000, n_ctx = 3000;
    const smp_vocab v(n_vocab);
    smp_random r(9);
    const smp_floats logits = r.logits(n_vocab, false);
    for (int top_k : {0, 1, 40, 4000, 5000})
        for (int mask = 0; mask < 16; mask++) {
            engine_sampling o = {};
            o.temperature = mask & 1 ? 1 : 0;
            o.top_k = top_k;
            o.top_p = mask & 2 ? 0.9f : 0, o.typical_p = mask & 2 ? 0.9f : 0;
            o.repeat_penalty = mask & 4 ? 1.2f : 0;
            o.dry_multiplier = mask & 8 ? 1 : 0;
            o = smp_checked(o, v.v);
            sampler_room room;
            reserve_room(room, o, n_vocab, n_ctx);
            const auto places = [&] {
                return std::vector<const void *>{room.logits.data(), room.pick.data(),  room.part.data(),
                                                 room.shares.data(), room.tally.data(), room.seen.data(),
                                                 room.match.data()};
            };
            const auto before = places();
            for (size_t n : {size_t(1), size_t(500), n_ctx}) {
                // The best tokens come last: top-k has to look at all of them.
                smp_floats rising = logits;
                std::sort(rising.begin(), rising.end());
                sample(logits, o, v.v, r.timeline(n, int(n_vocab)), room);
                sample(rising, o, v.v, smp_ids(n, 7), room);
            }
            EXPECT_EQ(places(), before) << "top_k " << top_k << " mask " << mask;
        }
}

// ---- metadata ---------------------------------------------------------------------------------------------------

std::vector<std::string> smp_warnings;

struct smp_defaults {
    engine_sampling s = {};
    bool used = false;
    std::vector<std::string> warnings;
    explicit smp_defaults(const gguf_writer &w) {
        const std::string bytes = w.bytes();
        smp_warnings.clear();
        engine_set_log(
            [](void *, int level, const char *text) {
                if (level == ENGINE_LOG_WARN)
                    smp_warnings.push_back(text);
            },
            nullptr);
        try {
            const model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "m.gguf");
            used = default_sampling(f, s);
        } catch (const Error &e) {
            ADD_FAILURE() << e.msg;
        }
        engine_set_log(nullptr, nullptr);
        warnings.swap(smp_warnings);
    }
    bool common() const {
        return s.temperature == 0.8f && s.top_k == 40 && s.top_p == 0.95f && s.min_p == 0.05f &&
               s.xtc_probability == 0 && s.xtc_threshold == 0 && s.penalty_last_n == 0 && s.repeat_penalty == 0;
    }
};

TEST(Sampler, DefaultsFollowTheMetadata) {
    const std::string p = "general.sampling.";
    {
        const gguf_writer w;
        const smp_defaults d(w);
        EXPECT_TRUE(d.common());
        EXPECT_FALSE(d.used);
        EXPECT_TRUE(d.warnings.empty());
    }
    {
        gguf_writer w;
        w.add_f32(p + "temp", 0.6f), w.add_i32(p + "top_k", 20), w.add_f32(p + "top_p", 0.9f);
        w.add_f64(p + "min_p", 0), w.add_f32(p + "xtc_probability", 0.25f), w.add_f32(p + "xtc_threshold", 0.2f);
        w.add_i32(p + "penalty_last_n", -1), w.add_f32(p + "penalty_repeat", 1.05f);
        w.add_i32(p + "mirostat", 0), w.add_f32(p + "mirostat_tau", 5), w.add_f32(p + "mirostat_eta", 0.1f);
        const smp_defaults d(w);
        EXPECT_TRUE(d.used);
        EXPECT_EQ(d.warnings, std::vector<std::string>());
        EXPECT_EQ(d.s.temperature, 0.6f);
        EXPECT_EQ(d.s.top_k, 20);
        EXPECT_EQ(d.s.top_p, 0.9f);
        EXPECT_EQ(d.s.min_p, 0);
        EXPECT_EQ(d.s.xtc_probability, 0.25f);
        EXPECT_EQ(d.s.xtc_threshold, 0.2f);
        EXPECT_EQ(d.s.penalty_last_n, -1);
        EXPECT_EQ(d.s.repeat_penalty, 1.05f);
    }
    {
        gguf_writer w; // numbers of another kind with the same value, and "off" in other people's words
        w.add_u64(p + "temp", 1), w.add_f32(p + "top_k", 64), w.add_i8(p + "top_p", 1);
        w.add_i32(p + "penalty_last_n", 0), w.add_f32(p + "penalty_repeat", 1.3f);
        smp_defaults d(w);
        EXPECT_TRUE(d.used && d.warnings.empty());
        EXPECT_EQ(d.s.temperature, 1);
        EXPECT_EQ(d.s.top_k, 64);
        EXPECT_EQ(d.s.top_p, 1);
        EXPECT_EQ(d.s.repeat_penalty, 0) << "a window of no tokens is no penalty";
        gguf_writer w2;
        w2.add_i32(p + "top_k", -1);
        EXPECT_EQ(smp_defaults(w2).s.top_k, 0);
    }
    const auto refused = [&](const char *name, auto &&add) {
        gguf_writer w;
        add(w, p + name);
        const smp_defaults d(w);
        EXPECT_TRUE(d.common()) << name;
        EXPECT_FALSE(d.used) << name;
        EXPECT_EQ(d.warnings.size(), 1u) << name;
        return d.warnings.empty() ? "" : d.warnings[0];
    };
    const auto real = [](float x) { return [x](gguf_writer &w, const std::string &key) { w.add_f32(key, x); }; };
    EXPECT_EQ(refused("temp", real(-1)), "m.gguf: general.sampling.temp is -1, expected 0 to 1000; it is ignored");
    EXPECT_EQ(refused("top_k", real(2.5f)),
              "m.gguf: general.sampling.top_k is 2.5, expected a whole number from -1 to 2.14748e+09; it is ignored");
    for (const char *name :
         {"temp", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "penalty_last_n", "penalty_repeat"}) {
        refused(name, real(NAN)), refused(name, real(INFINITY)), refused(name, real(-INFINITY));
        refused(name, real(-7)), refused(name, real(3e9f));
        EXPECT_NE(refused(name, [](gguf_writer &w, const std::string &key) { w.add_string(key, "0.5"); })
                      .find("has type string, expected a number"),
                  std::string::npos);
        refused(name, [](gguf_writer &w, const std::string &key) { w.add_bool(key, true); });
        refused(name, [](gguf_writer &w, const std::string &key) { w.add_f32s(key, {1, 2}); });
        refused(name, [](gguf_writer &w, const std::string &key) { w.add_u64(key, UINT64_MAX); });
    }
    EXPECT_EQ(refused("mirostat", real(2)), "m.gguf: general.sampling.mirostat is not supported; it is ignored");
    refused("sequence", [](gguf_writer &w, const std::string &key) { w.add_string(key, "top_k;temperature"); });
    refused("mirostat", [](gguf_writer &w, const std::string &key) { w.add_string(key, "on"); });
    refused("", real(0));
    refused("x", real(0));
}

// ---- through the API --------------------------------------------------------------------------------------------

struct smp_session {
    engine_model *m = nullptr;
    engine_session *s = nullptr;
    engine_error err = {};
    smp_session() {
        engine_open_options o = {};
        o.threads = 1;
        EXPECT_EQ(engine_open(&m, smp_model.c_str(), &o, &err), 0) << err.msg;
        EXPECT_EQ(engine_session_new(&s, m, nullptr, &err), 0) << err.msg;
    }
    ~smp_session() {
        engine_session_free(s);
        engine_close(m);
    }
    smp_session(const smp_session &) = delete;
    void sync(const smp_ids &ids) { EXPECT_GE(engine_sync(s, ids.data(), ids.size(), &err), 0) << err.msg; }
    smp_ids tokens() {
        smp_ids t(size_t(engine_tokens(s, nullptr, 0)));
        engine_tokens(s, t.data(), t.size());
        return t;
    }
};

TEST(Sampler, ApiAppliesEverySetting) {
    smp_session s;
    const engine_logit_bias bias[] = {{5, -INFINITY}, {7, 2}};
    engine_sampling o = {};
    o.temperature = 0.9f, o.top_k = 100, o.top_p = 0.98f, o.min_p = 0.01f, o.typical_p = 0.97f, o.seed = 11;
    o.penalty_last_n = 30, o.repeat_penalty = 1.2f, o.presence_penalty = 0.1f, o.frequency_penalty = 0.1f;
    o.dry_multiplier = 0.8f, o.xtc_probability = 0.5f, o.bias = bias, o.n_bias = 2;
    const smp_ids prompt = {1, 20, 30, 40, 20, 30, 40, 20, 30};
    s.sync(prompt);
    smp_ids want = prompt;
    for (int i = 0; i < 40; i++) {
        const float *l = nullptr;
        const int n = engine_logits(s.s, &l, &s.err);
        ASSERT_EQ(n, s.m->voc.n);
        sampler_room room;
        const int32_t expected = sample(smp_floats(l, l + n), smp_checked(o, s.m->voc), s.m->voc, want, room);
        const int32_t id = engine_sample(s.s, &o, &s.err);
        ASSERT_EQ(id, expected) << s.err.msg;
        want.push_back(id);
        ASSERT_EQ(engine_eval(s.s, &id, 1, &s.err), 0) << s.err.msg;
    }
    s.sync(prompt);
    engine_generate_options g = {};
    g.sampling = &o, g.max_tokens = 40, g.ignore_end = 1;
    ASSERT_EQ(engine_generate(s.s, &g, nullptr, nullptr, nullptr, &s.err), 0) << s.err.msg;
    EXPECT_EQ(s.tokens(), want) << "generating and sampling token by token is the same";
    s.sync(prompt);
    const engine_logit_bias bad[] = {{s.m->voc.n, 1}};
    o.bias = bad, o.n_bias = 1;
    EXPECT_EQ(engine_sample(s.s, &o, &s.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_generate(s.s, &g, nullptr, nullptr, nullptr, &s.err), ENGINE_EINVAL);
    EXPECT_NE(std::string(s.err.msg).find("bias[0].id is 2048"), std::string::npos) << s.err.msg;
}

TEST(Sampler, ApiDefaults) {
    smp_session s;
    engine_sampling o = {};
    int from_model = 7;
    ASSERT_EQ(engine_sampling_defaults(s.m, &o, &from_model, &s.err), 0) << s.err.msg;
    EXPECT_EQ(from_model, 0);
    EXPECT_EQ(o.size, sizeof o);
    EXPECT_EQ(o.temperature, 0.8f);
    EXPECT_EQ(o.top_k, 40);
    s.sync({1, 2, 3});
    EXPECT_GE(engine_sample(s.s, &o, &s.err), 0) << s.err.msg;
    o = {};
    o.size = offsetof(engine_sampling, top_p); // an older caller's struct ends there
    o.top_p = 0.125f;
    ASSERT_EQ(engine_sampling_defaults(s.m, &o, nullptr, &s.err), 0) << s.err.msg;
    EXPECT_EQ(o.top_k, 40);
    EXPECT_EQ(o.top_p, 0.125f);
    o.size = 3;
    EXPECT_EQ(engine_sampling_defaults(s.m, &o, nullptr, &s.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_sampling_defaults(s.m, nullptr, nullptr, &s.err), ENGINE_EINVAL);
    EXPECT_EQ(engine_sampling_defaults(nullptr, &o, nullptr, &s.err), ENGINE_EINVAL);
}

TEST(Sampler, TopIsSortedAndNormalised) {
    smp_session s;
    s.sync({1, 20, 30, 40, 20, 30});
    std::vector<engine_candidate> top(3000);
    ASSERT_EQ(engine_top(s.s, top.data(), top.size(), &s.err), 2048) << s.err.msg;
    const float *l = nullptr;
    ASSERT_EQ(engine_logits(s.s, &l, &s.err), 2048);
    double sum = 0;
    for (size_t i = 0; i < 2048; i++) {
        sum += std::exp(double(top[i].logprob));
        EXPECT_EQ(top[i].logit, l[top[i].id]);
        if (i > 0) {
            EXPECT_TRUE(top[i - 1].logit > top[i].logit ||
                        (top[i - 1].logit == top[i].logit && top[i - 1].id < top[i].id));
        }
    }
    EXPECT_NEAR(sum, 1, 1e-5);
    for (size_t cap : {0, 1, 7, 2047}) {
        std::vector<engine_candidate> some(cap + 1);
        ASSERT_EQ(engine_top(s.s, some.data(), cap, &s.err), int(cap)) << s.err.msg;
        for (size_t i = 0; i < cap; i++)
            EXPECT_EQ(some[i].id, top[i].id);
    }
    EXPECT_EQ(engine_top(s.s, nullptr, 0, &s.err), 0);
    EXPECT_EQ(engine_top(s.s, nullptr, 1, &s.err), ENGINE_EINVAL);
}

} // namespace
