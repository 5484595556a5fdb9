// Calls kernels of a library as it is asked on standard input, and answers with what they left in memory: so kernels
// for another processor run under an emulator, and are tested by the same operators and references as any.
//
// A call: the function's name on a line (its name as it can be replayed), the number of arguments, and of each its
// kind: 0, an integer; 1, a double; 2, memory: its size, and its bytes. All numbers are 8 bytes. The answer: the
// memory, in order. "supported_<isa>" is answered by 8 bytes.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

union Arg {
    void* pointer;
    int64_t integer;
    double real;
};

static int64_t number() {
    int64_t value;
    if (fread(&value, 8, 1, stdin) != 1) exit(0);
    return value;
}

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    char name[256];
    while (fgets(name, sizeof name, stdin)) {
        name[strcspn(name, "\n")] = 0;
        void* function = dlsym(library, name);
        if (strncmp(name, "supported_", 10) == 0) {
            const int64_t answer = function ? ((int (*)())function)() : 0;
            fwrite(&answer, 8, 1, stdout);
            fflush(stdout);
            continue;
        }
        if (!function) return fprintf(stderr, "no %s\n", name), 1;
        const int64_t count = number();
        Arg args[64];
        int64_t sizes[64];
        for (int64_t i = 0; i < count; i++) {
            const int64_t kind = number();
            sizes[i] = kind == 2 ? number() : -1;
            if (kind == 2) {
                args[i].pointer = aligned_alloc(64, (sizes[i] + 127) / 64 * 64);
                if (sizes[i] && fread(args[i].pointer, sizes[i], 1, stdin) != 1) return 1;
            } else {
                args[i].integer = number();  // the bits of a double, where it is one
            }
        }
        ((void (*)(const Arg*))function)(args);
        for (int64_t i = 0; i < count; i++)
            if (sizes[i] >= 0) fwrite(args[i].pointer, 1, sizes[i], stdout), free(args[i].pointer);
        fflush(stdout);
    }
}
