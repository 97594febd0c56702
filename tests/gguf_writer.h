// gguf_writer.h: writes GGUF files, for the tests and for tools/make_model. It shares no code with the engine, so that
// an error there does not hide behind the same error here. C++17, standard library only, little-endian machines.
//
// In memory (small files, also deliberately wrong ones: every field can be overridden before bytes()):
//     gguf_writer w;  w.add_u32("a.b", 3);  w.add_tensor("t", 0, {4}, data).offset = 7;  string file = w.bytes();
// To a file, with the weights streamed (no more than the caller's piece is in memory):
//     gguf_writer w(path);  add keys;  add_tensor(name, type, dims) for each;
//     w.begin();  w.write(p, n) as often as needed, tensor after tensor in that order;  w.finish();
// What cannot be written throws std::runtime_error.
#ifndef GGUF_WRITER_H
#define GGUF_WRITER_H

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

enum gguf_type : uint32_t {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
};

// Appends the bytes of a value as they are in memory.
template <class T> inline void gguf_put(std::string &out, const T &v) {
    out.append(reinterpret_cast<const char *>(&v), sizeof v);
}
template <class T> inline std::string gguf_raw(const T &v) {
    std::string s;
    gguf_put(s, v);
    return s;
}
// A length and the bytes; the length can lie.
inline std::string gguf_string(const std::string &s) { return gguf_raw(uint64_t(s.size())) + s; }
inline std::string gguf_string(const std::string &s, uint64_t length) { return gguf_raw(length) + s; }
// The head of an array: type of its items and their count.
inline std::string gguf_array_head(uint32_t type, uint64_t count) { return gguf_raw(type) + gguf_raw(count); }
template <class T> inline std::string gguf_array(uint32_t type, const std::vector<T> &v) {
    std::string s = gguf_array_head(type, v.size());
    for (const T &x : v)
        gguf_put(s, x);
    return s;
}

// Values and bytes of one block of a GGML type; false for a type that is not known here.
inline bool gguf_block(uint32_t type, uint64_t &values, uint64_t &bytes) {
    static const struct {
        uint32_t type, values, bytes;
    } blocks[] = {
        {0, 1, 4},     {1, 1, 2},      {2, 32, 18},    {3, 32, 20},    {6, 32, 22},    {7, 32, 24},  {8, 32, 34},
        {10, 256, 84}, {11, 256, 110}, {12, 256, 144}, {13, 256, 176}, {14, 256, 210}, {20, 32, 18}, {23, 256, 136},
        {24, 1, 1},    {25, 1, 2},     {26, 1, 4},     {27, 1, 8},     {28, 1, 8},     {30, 1, 2},   {39, 32, 17},
    };
    for (auto &b : blocks)
        if (b.type == type) {
            values = b.values, bytes = b.bytes;
            return true;
        }
    return false;
}

struct gguf_tensor {
    std::string name;
    uint32_t type;
    std::vector<uint64_t> dims; // dims[0] = row length
    std::string data;           // in memory only; filled up with zeros to `bytes`
    uint64_t bytes;             // what the tensor takes in the data section
    uint64_t offset;            // what the file says; set from the true place in add_tensor
    uint32_t n_dims;            // what the file says
    uint64_t place;             // where the data really goes, in the data section
};

struct gguf_writer {
    // Fields of the head that a test may set before bytes() or begin().
    std::string magic = "GGUF";
    uint32_t version = 3;
    std::string keys; // encoded; a test may append anything, with n_keys
    uint64_t n_keys = 0;
    std::string tensor_infos; // encoded, after those of `tensors`; with extra_tensors
    uint64_t extra_tensors = 0;
    std::vector<gguf_tensor> tensors;

    gguf_writer() = default;
    explicit gguf_writer(const std::string &file) : path(file), out(fopen(file.c_str(), "wb")) {
        if (!out)
            stop();
    }
    ~gguf_writer() {
        if (out)
            fclose(out);
    }
    gguf_writer(const gguf_writer &) = delete;
    gguf_writer &operator=(const gguf_writer &) = delete;

    // ---- metadata ----

    void add_raw(const std::string &key, uint32_t type, const std::string &value) {
        keys += gguf_string(key) + gguf_raw(type) + value;
        n_keys++;
    }
    void add_u8(const std::string &key, uint8_t v) { add_raw(key, GGUF_U8, gguf_raw(v)); }
    void add_i8(const std::string &key, int8_t v) { add_raw(key, GGUF_I8, gguf_raw(v)); }
    void add_u16(const std::string &key, uint16_t v) { add_raw(key, GGUF_U16, gguf_raw(v)); }
    void add_i16(const std::string &key, int16_t v) { add_raw(key, GGUF_I16, gguf_raw(v)); }
    void add_u32(const std::string &key, uint32_t v) { add_raw(key, GGUF_U32, gguf_raw(v)); }
    void add_i32(const std::string &key, int32_t v) { add_raw(key, GGUF_I32, gguf_raw(v)); }
    void add_u64(const std::string &key, uint64_t v) { add_raw(key, GGUF_U64, gguf_raw(v)); }
    void add_i64(const std::string &key, int64_t v) { add_raw(key, GGUF_I64, gguf_raw(v)); }
    void add_f32(const std::string &key, float v) { add_raw(key, GGUF_F32, gguf_raw(v)); }
    void add_f64(const std::string &key, double v) { add_raw(key, GGUF_F64, gguf_raw(v)); }
    void add_bool(const std::string &key, bool v) { add_raw(key, GGUF_BOOL, gguf_raw(uint8_t(v))); }
    void add_string(const std::string &key, const std::string &v) { add_raw(key, GGUF_STRING, gguf_string(v)); }

    void add_strings(const std::string &key, const std::vector<std::string> &v) {
        std::string s = gguf_array_head(GGUF_STRING, v.size());
        for (const std::string &x : v)
            s += gguf_string(x);
        add_raw(key, GGUF_ARRAY, s);
    }
    template <class T> void add_array(const std::string &key, uint32_t type, const std::vector<T> &v) {
        add_raw(key, GGUF_ARRAY, gguf_array(type, v));
    }
    void add_bools(const std::string &key, const std::vector<uint8_t> &v) { add_array(key, GGUF_BOOL, v); }
    void add_u8s(const std::string &key, const std::vector<uint8_t> &v) { add_array(key, GGUF_U8, v); }
    void add_u32s(const std::string &key, const std::vector<uint32_t> &v) { add_array(key, GGUF_U32, v); }
    void add_i32s(const std::string &key, const std::vector<int32_t> &v) { add_array(key, GGUF_I32, v); }
    void add_u64s(const std::string &key, const std::vector<uint64_t> &v) { add_array(key, GGUF_U64, v); }
    void add_f32s(const std::string &key, const std::vector<float> &v) { add_array(key, GGUF_F32, v); }
    void add_f64s(const std::string &key, const std::vector<double> &v) { add_array(key, GGUF_F64, v); }

    // The alignment of the data section and of each tensor in it, 32 unless told. Call it before add_tensor.
    void set_alignment(uint32_t bytes) {
        add_u32("general.alignment", bytes);
        alignment = bytes;
    }

    // ---- tensors ----

    // The size follows from type and dims; for what has no size (an unknown type, a row that is no multiple of the
    // block, a product that wraps) it is the size of `data`. The result is valid until the next call.
    gguf_tensor &add_tensor(const std::string &name, uint32_t type, const std::vector<uint64_t> &dims,
                            const std::string &data = "") {
        uint64_t values = 1, bytes = 0, size = data.size();
        if (data.empty() && gguf_block(type, values, bytes)) {
            size = dims.empty() ? 0 : dims[0] / values * bytes;
            for (size_t i = 1; i < dims.size(); i++)
                size *= dims[i];
        }
        uint64_t place = tensors.empty() ? 0 : pad(tensors.back().place + tensors.back().bytes);
        tensors.push_back({name, type, dims, data, size, place, uint32_t(dims.size()), place});
        return tensors.back();
    }
    gguf_tensor &add_floats(const std::string &name, const std::vector<uint64_t> &dims, const std::vector<float> &v) {
        return add_tensor(name, 0, dims, std::string(reinterpret_cast<const char *>(v.data()), 4 * v.size()));
    }

    // ---- output ----

    // The whole file.
    std::string bytes() const {
        std::string s = head();
        size_t start = s.size();
        for (const gguf_tensor &t : tensors) {
            s.resize(start + size_t(t.place), '\0');
            s += t.data;
            s.resize(start + size_t(t.place + t.bytes), '\0');
        }
        return s;
    }

    // Writes the head; from here on the tensors' bytes are expected.
    void begin() {
        put(head());
        current = 0, written = 0;
        skip_complete();
    }
    // The next bytes of the current tensor; the padding between tensors comes by itself.
    void write(const void *p, uint64_t n) {
        if (current >= tensors.size() || n > tensors[current].bytes - written)
            throw std::runtime_error(path + ": more bytes than the tensor " +
                                     (current < tensors.size() ? tensors[current].name : "list") + " takes");
        if (fwrite(p, 1, size_t(n), out) != n)
            stop();
        written += n;
        skip_complete();
    }
    void finish() {
        if (current < tensors.size())
            throw std::runtime_error(path + ": tensor " + tensors[current].name + " is not complete");
        FILE *f = out;
        out = nullptr;
        if (fclose(f) != 0)
            stop();
    }

  private:
    std::string path;
    FILE *out = nullptr;
    uint64_t alignment = 32;
    size_t current = 0;   // the tensor that is being written
    uint64_t written = 0; // its bytes so far

    uint64_t pad(uint64_t n) const { return alignment ? (n + alignment - 1) / alignment * alignment : n; }
    [[noreturn]] void stop() const { throw std::runtime_error(path + ": " + strerror(errno)); }
    void put(const std::string &s) {
        if (fwrite(s.data(), 1, s.size(), out) != s.size())
            stop();
    }
    std::string head() const {
        std::string s = magic;
        gguf_put(s, version);
        gguf_put(s, uint64_t(tensors.size()) + extra_tensors);
        gguf_put(s, n_keys);
        s += keys;
        for (const gguf_tensor &t : tensors) {
            s += gguf_string(t.name);
            gguf_put(s, t.n_dims);
            for (uint64_t d : t.dims)
                gguf_put(s, d);
            gguf_put(s, t.type);
            gguf_put(s, t.offset);
        }
        s += tensor_infos;
        s.resize(size_t(pad(s.size())), '\0');
        return s;
    }
    void skip_complete() {
        while (current < tensors.size() && written == tensors[current].bytes) {
            uint64_t end = tensors[current].place + written;
            current++, written = 0;
            if (current < tensors.size())
                put(std::string(size_t(tensors[current].place - end), '\0'));
        }
    }
};

#endif
