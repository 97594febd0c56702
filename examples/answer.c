/* answer MODEL PROMPT: prints the model's answer to one prompt. The smallest complete use of the engine from C.
     make lib && gcc -std=c99 -I. examples/answer.c build/release/libengine.a -lstdc++ -lm -pthread -o answer */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>

/* Called with each piece of text as it is made; nonzero would stop the answer. */
static int print(void *user, const char *text, size_t len) {
    (void)user;
    return fwrite(text, 1, len, stdout) != len || fflush(stdout) != 0;
}

int main(int argc, char **argv) {
    engine_error err = {0, ""};
    engine_model *model = NULL;
    engine_session *session = NULL;
    engine_generate_options options = {0};
    engine_message message = {"user", NULL};
    engine_result result;
    int32_t *ids = NULL;
    int n, status = 1;

    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL PROMPT\n", argv[0]);
        return 2;
    }
    if (engine_open(&model, argv[1], NULL, &err) < 0 || engine_session_new(&session, model, NULL, &err) < 0)
        goto done;

    /* The conversation in the model's own chat format: first how many tokens it has, then the tokens. */
    message.content = argv[2];
    n = engine_render_chat(model, &message, 1, NULL, NULL, 0, &err);
    if (n < 0)
        goto done;
    ids = malloc(sizeof *ids * (size_t)n);
    if (!ids) {
        fprintf(stderr, "%s: out of memory\n", argv[0]);
        goto done;
    }
    if (engine_render_chat(model, &message, 1, NULL, ids, (size_t)n, &err) < 0 ||
        engine_sync(session, ids, (size_t)n, &err) < 0)
        goto done;

    options.size = sizeof options;
    options.max_tokens = 256; /* and temperature 0: always the likeliest token */
    if (engine_generate(session, &options, print, NULL, &result, &err) < 0)
        goto done;
    status = putchar('\n') == EOF || fflush(stdout) != 0;
done:
    if (err.code)
        fprintf(stderr, "%s: %s\n", argv[0], err.msg);
    free(ids);
    engine_session_free(session);
    engine_close(model);
    return status;
}
