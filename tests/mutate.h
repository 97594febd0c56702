// mutate.h: deterministic damage to a valid file, for tests that a reader survives anything, and a meter of the heap.
//
//     mutate(valid, head, 100000, 1, [&](const std::string &bytes, int i) { ... open `bytes`, use what opens ... });
//
// The same arguments give the same mutations on every machine. Include it in one translation unit of a program only: it
// replaces the global operator new and delete, in a way that works under the sanitizers too.
#ifndef MUTATE_H
#define MUTATE_H

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <malloc.h>
#include <new>
#include <string>

namespace test {

// Bytes that operator new has handed out and not got back, and the largest that this was since the last reset.
struct heap_meter {
    static std::atomic<int64_t> &live() {
        static std::atomic<int64_t> bytes{0};
        return bytes;
    }
    static std::atomic<int64_t> &top() {
        static std::atomic<int64_t> bytes{0};
        return bytes;
    }
    int64_t start = live();
    heap_meter() { top() = start; }
    // The most that was in use since the construction of this meter, beyond what was in use then.
    int64_t peak() const { return top() - start; }
};

inline void *counted_new(size_t n, size_t align = 0) {
    void *p = align ? aligned_alloc(align, (n + align - 1) / align * align) : malloc(n ? n : 1);
    if (!p)
        return nullptr;
    int64_t now = heap_meter::live() += int64_t(malloc_usable_size(p));
    int64_t top = heap_meter::top();
    while (now > top && !heap_meter::top().compare_exchange_weak(top, now))
        ;
    return p;
}
inline void counted_delete(void *p) {
    if (p)
        heap_meter::live() -= int64_t(malloc_usable_size(p));
    free(p);
}
inline void *counted_new_or_throw(size_t n, size_t align = 0) {
    if (void *p = counted_new(n, align))
        return p;
    throw std::bad_alloc();
}

// A small generator with the same numbers everywhere.
struct mutation_random {
    uint64_t state;
    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    size_t below(size_t n) { return n ? size_t(next() % n) : 0; }
};

// One mutation of `s`. head: bytes at the start that are worth most of the damage (metadata).
inline void mutate_once(std::string &s, size_t head, mutation_random &r) {
    const size_t n = s.size();
    if (n < 32)
        return;
    auto value = [&]() -> uint64_t { // one that a careless reader trips over
        switch (r.below(4)) {
        case 0:
            return r.below(40);
        case 1:
            return (1ull << r.below(64)) - 1 + r.below(3);
        case 2:
            return ~0ull - r.below(64);
        default:
            return n - 64 + r.below(128);
        }
    };
    auto position = [&](size_t length) { // of `length` bytes inside s, mostly in the head
        size_t end = r.below(8) ? std::min(head, n) : n;
        return r.below(std::max(end, length) - length + 1);
    };
    // Where eight bytes read as a small number: most likely a length, a count, a dimension or an offset.
    auto length_field = [&] {
        size_t at = position(8);
        for (size_t i = at; i < std::min(at + 256, n - 8); i++) {
            uint64_t v;
            memcpy(&v, &s[i], 8);
            if (v && v <= n)
                return i;
        }
        return at;
    };
    size_t size = 1 + r.below(r.below(4) ? 16 : std::min(n / 4, size_t(4096)));
    switch (r.below(12)) {
    case 0:
        s[position(1)] ^= char(1 << r.below(8));
        break;
    case 1:
        s[position(1)] = char(r.below(2) ? r.next() : value());
        break;
    case 2:
        for (size_t i = 0, k = 2 + r.below(7); i < k; i++)
            s[position(1)] = char(r.next());
        break;
    case 3: {
        uint32_t v = uint32_t(value());
        memcpy(&s[position(4)], &v, 4);
        break;
    }
    case 4:
    case 5: {
        uint64_t v = value();
        memcpy(&s[length_field()], &v, 8);
        break;
    }
    case 6: {
        size_t at = length_field();
        uint64_t v;
        memcpy(&v, &s[at], 8);
        v += r.below(33) - 16;
        memcpy(&s[at], &v, 8);
        break;
    }
    case 7:
        s.erase(position(size), size);
        break;
    case 8: {
        std::string block(size, '\0');
        for (char &c : block)
            c = char(r.next());
        s.insert(position(1), r.below(2) ? block : std::string(size, '\0'));
        break;
    }
    case 9: // the same bytes twice: keys, tensors and items that repeat
        s.insert(position(1), s.substr(position(size), size));
        break;
    case 10: {
        std::string block = s.substr(position(size), size);
        size_t at = position(size);
        s.replace(at, std::min(block.size(), n - at), block.substr(0, n - at));
        break;
    }
    default:
        s.resize(r.below(4) ? position(1) : n - std::min(n, r.below(64)));
    }
}

// Calls fn(bytes, i) for i in [0, count), each time with one to three mutations of `valid`.
template <class F> void mutate(const std::string &valid, size_t head, int count, uint64_t seed, F &&fn) {
    std::string bytes;
    for (int i = 0; i < count; i++) {
        mutation_random r{seed * 0x2545f4914f6cdd1du + uint64_t(i)};
        bytes = valid;
        for (size_t k = 0, n = r.below(3) ? 1 : 1 + r.below(3); k < n; k++)
            mutate_once(bytes, head, r);
        fn(static_cast<const std::string &>(bytes), i);
    }
}

} // namespace test

// ThreadSanitizer has operators of its own that cannot be replaced: there the meter stays at 0.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HEAP_METER_OFF
#endif
#endif
#if !defined(HEAP_METER_OFF) && !defined(__SANITIZE_THREAD__)

// GCC sees malloc and free through the replaced operators and takes them for a mismatch.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif
void *operator new(size_t n) { return test::counted_new_or_throw(n); }
void *operator new[](size_t n) { return test::counted_new_or_throw(n); }
void *operator new(size_t n, const std::nothrow_t &) noexcept { return test::counted_new(n); }
void *operator new[](size_t n, const std::nothrow_t &) noexcept { return test::counted_new(n); }
void *operator new(size_t n, std::align_val_t a) { return test::counted_new_or_throw(n, size_t(a)); }
void *operator new[](size_t n, std::align_val_t a) { return test::counted_new_or_throw(n, size_t(a)); }
void operator delete(void *p) noexcept { test::counted_delete(p); }
void operator delete[](void *p) noexcept { test::counted_delete(p); }
void operator delete(void *p, size_t) noexcept { test::counted_delete(p); }
void operator delete[](void *p, size_t) noexcept { test::counted_delete(p); }
void operator delete(void *p, std::align_val_t) noexcept { test::counted_delete(p); }
void operator delete[](void *p, std::align_val_t) noexcept { test::counted_delete(p); }
void operator delete(void *p, size_t, std::align_val_t) noexcept { test::counted_delete(p); }
void operator delete[](void *p, size_t, std::align_val_t) noexcept { test::counted_delete(p); }

#endif // not ThreadSanitizer

#endif
