// Session files: any bytes, and files whose checksums are right and whose content is not. Loading one is an error or
// gives a session that computes.
#include <sys/mman.h>

namespace {

struct fuzz_target {
    engine_model *model = nullptr;
    engine_session *session = nullptr;
    std::string good; // a valid file
    int fd;

    fuzz_target() : fd(memfd_create("session", MFD_CLOEXEC)) {
        engine_error err = {};
        engine_session_options opt = {};
        opt.n_ctx = 600;
        opt.checkpoints = 3;
        engine_open_options open = {};
        open.threads = 1;
        if (engine_open(&model, "tests/fuzz/session_model.gguf", &open, &err) < 0 ||
            engine_session_new(&session, model, &opt, &err) < 0)
            fail(err.msg);
        std::vector<int32_t> ids;
        for (int i = 0; i < 330; i++)
            ids.push_back(i * 7 % model->voc.n);
        for (const size_t n : {size_t(150), size_t(290), ids.size()}) // turns, each of which leaves a checkpoint
            if (engine_sync(session, ids.data(), n, &err) < 0)
                fail(err.msg);
        engine_set_note(session, "note", 4, &err);
        char name[] = "/tmp/engine-fuzz-XXXXXX";
        close(mkstemp(name));
        if (engine_save(session, name, &err) < 0)
            fail(err.msg);
        FILE *f = fopen(name, "rb");
        char buf[4096];
        for (size_t n; f && (n = fread(buf, 1, sizeof buf, f)) > 0;)
            good.append(buf, n);
        if (f)
            fclose(f);
        unlink(name);
    }
    [[noreturn]] static void fail(const char *msg) {
        fprintf(stderr, "%s\n", msg);
        abort();
    }
    void load(const std::string &bytes) {
        if (ftruncate(fd, 0) || pwrite(fd, bytes.data(), bytes.size(), 0) != ssize_t(bytes.size()))
            abort();
        engine_error err = {};
        const std::string path = "/proc/self/fd/" + std::to_string(fd);
        const int n = engine_load(session, path.c_str(), &err);
        const float *logits;
        if (n < 0 && !err.msg[0])
            abort();
        if (n > 0) {
            const int r = engine_logits(session, &logits, &err);
            if (r < 0 && r != ENGINE_ENUMERIC)
                fail(err.msg);
            engine_rewind(session, size_t(n) / 2, &err);
            const int32_t id = 1;
            engine_eval(session, &id, 1, &err);
        }
    }
};

} // namespace

// The first byte chooses: the rest as a file, or edits of the valid one (two bytes position, one byte value) with new
// checksums behind them.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static fuzz_target t;
    if (!size)
        return 0;
    const std::string rest(reinterpret_cast<const char *>(data + 1), size - 1);
    if (data[0] & 1) {
        t.load(rest);
        return 0;
    }
    session_head head;
    memcpy(&head, t.good.data(), sizeof head);
    const uint64_t page[] = {head.page_bytes[0] + 32, head.page_bytes[1] + 32};
    const size_t at = t.good.size() - size_t(head.n_pages[0] * page[0] + head.n_pages[1] * page[1]) - 32;
    std::string bytes = t.good;
    for (size_t i = 0; i + 3 <= rest.size(); i += 3)
        bytes[size_t(uint8_t(rest[i]) | uint8_t(rest[i + 1]) << 8) % at] = rest[i + 2];
    const digest sum = sha256().add(bytes.data(), at).finish();
    memcpy(&bytes[at], &sum, 32);
    size_t p = at + 32;
    for (uint64_t no = 0; no < head.n_pages[0] + head.n_pages[1]; no++) {
        const size_t n = size_t(page[no < head.n_pages[0] ? 0 : 1]) - 32;
        const digest d = sha256().value(sum).value(no).add(&bytes[p], n).finish();
        memcpy(&bytes[p + n], &d, 32);
        p += n + 32;
    }
    t.load(bytes);
    return 0;
}
