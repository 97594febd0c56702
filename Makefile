# engine: build, test, install. `make` needs only a C++20 compiler, GNU make and POSIX tools.
#
#   make                      ./engine, release
#   make run                  chat with the model in models/; with text piped in, answer that
#   make test                 install what the tests need, build and run all of them
#   make lib                  libengine.a, libengine.so and engine.pc, in the build folder
#   make install PREFIX=/usr  bin, lib, include, pkgconfig, doc; DESTDIR= is honoured; `make uninstall` undoes it
#   make info                 what this machine offers; `make help`: this text
#
#   config=release|debug|sanitize|tsan and CXX=clang++ choose what is built and run; each pair has its own folder in
#   build/. Without CXX it is g++, or clang++ where that is all there is; ./engine is that compiler's release build.
#   cuda=yes puts the CUDA backend into ./engine, which takes nvcc some minutes.
#   Further targets: deps test-long test-cuda-long cuda-table fuzz bench-models size format format-check clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all
config ?= release
PREFIX ?= /usr/local
DESTDIR ?=
MODEL ?= models/tiny-chat-q8_0.gguf
FUZZ_SECONDS ?= 60
FUZZ_CXX ?= clang++

VERSION := $(shell sed -n 's/^.define ENGINE_VERSION "\(.*\)"/\1/p' engine.h)
SOVERSION := 0

# ---- compiler and flags ----------------------------------------------------------------------------------------------
# No -march: the engine looks at the processor when it runs. No -ffast-math: results are defined bit for bit.

FOUND_CXX := $(or $(shell for c in g++ clang++; do command -v $$c >/dev/null && echo $$c && break; done),g++)
ifeq ($(origin CXX),default)
CXX := $(FOUND_CXX)
endif
CLANG := $(findstring clang,$(notdir $(CXX)))
B := build/$(config)$(if $(CLANG),-clang)

WARN := -Wall -Wextra $(if $(CLANG),,-Wno-restrict) $(WERROR)
# Strict builds (CI): make WERROR=-Werror. g++ 12 sees overlaps in string additions that are not there (-Wrestrict).
BASE := -std=c++20 -pthread -fPIC -fvisibility=hidden -ffunction-sections -fdata-sections $(WARN)
ifeq ($(config),release)
OPT := -O3
TEST_OPT := -O2
else ifeq ($(config),debug)
OPT := -O0 -g
TEST_OPT := -O0 -g
else ifeq ($(config),sanitize)
OPT := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
TEST_OPT := $(OPT)
else ifeq ($(config),tsan)
OPT := -O1 -g1 -fsanitize=thread
TEST_OPT := $(OPT)
else
$(error config=$(config): expected release, debug, sanitize or tsan)
endif
DEPFLAGS = -MMD -MP -MT $@ -MF $@.d
LINK := -pthread -Wl,--gc-sections

# ---- what the machine offers -----------------------------------------------------------------------------------------
# Each is tried once, with a small link, and only for goals that use it.

H := \#
comma := ,
try = $(shell t=$$(mktemp); printf '$(2)\n int main() { return 0; }\n' | $(CXX) -std=c++20 -x c++ - -o "$$t" $(1) >/dev/null 2>&1 && echo yes; rm -f "$$t")
has = $(shell command -v $(1) 2>/dev/null)

# A release binary carries the C++ library and libedit in itself where their static versions are installed.
STATIC := -static-libstdc++ -static-libgcc
EDIT_STATIC := -Wl,-Bstatic -ledit -ltinfo -lbsd -lmd -Wl,-Bdynamic
NEEDS_FEATURES := $(if $(MAKECMDGOALS),$(filter-out run help clean deps uninstall format format-check,$(MAKECMDGOALS)),all)
ifneq ($(NEEDS_FEATURES),)
ifeq ($(config),release)
LINK_STATIC := $(if $(call try,$(STATIC)),$(STATIC))
endif
EDIT_CALL := $(H)include <histedit.h>\nvoid f() { el_end(el_init(0, 0, 0, 0)); }
ifeq ($(call try,$(EDIT_STATIC),$(EDIT_CALL)),yes)
EDIT_LIBS := $(EDIT_STATIC)
else ifeq ($(call try,-ledit,$(EDIT_CALL)),yes)
EDIT_LIBS := -ledit
endif
endif
# nvcc, and the headers that the simulator of tests/cusim needs.
NVCC := $(firstword $(call has,nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA_INC := $(if $(NVCC),$(patsubst %/cuda_runtime.h,%,$(firstword $(wildcard $(patsubst %/bin/nvcc,%/include,$(NVCC))/cuda_runtime.h))))
EDIT_FLAGS := $(if $(EDIT_LIBS),-DHAVE_LIBEDIT)

# ---- the program and the library -------------------------------------------------------------------------------------

.PHONY: all lib run help info size clean install uninstall deps test test-long test-binaries fuzz format format-check bench-models

all: $(B)/engine
ifeq ($(B),build/release$(if $(filter clang++,$(FOUND_CXX)),-clang))
all: engine
engine: $(B)/engine
	@cp -f $< $@
endif

$(B)/engine.o: engine.cpp Makefile | $(B)
	$(CXX) $(BASE) $(OPT) $(DEPFLAGS) $(CXXFLAGS) -c engine.cpp -o $@
$(B)/cli.o: cli.cpp Makefile | $(B)
	$(CXX) $(BASE) $(OPT) $(DEPFLAGS) $(EDIT_FLAGS) $(CXXFLAGS) -c cli.cpp -o $@
$(B)/engine: $(B)/engine.o $(B)/cli.o
	$(CXX) $(OPT) $(LINK) $(LINK_STATIC) $(LDFLAGS) $^ -o $@ $(EDIT_LIBS) $(CUDA_LIBS)

# cuda=yes puts the CUDA backend into the program, with the CUDA runtime; a driver is looked for when it runs.
ifeq ($(cuda),yes)
CUDA_OBJECT := $(B)/kernels.o
CUDA_LIBS := -L$(patsubst %/bin/nvcc,%/lib64,$(NVCC)) -lcudart_static -ldl -lrt
$(B)/engine: $(CUDA_OBJECT)
endif
# -fmad=false: a product and a sum are fused only where the source says so.
CUDA_ARCHS ?= 75 80 86 89 90 100 120
NVCC_FLAGS := -std=c++17 -O3 -fmad=false --threads 0 -Xfatbin -compress-all -Xptxas -v -Xcompiler -Wall,-Wextra,-fPIC,-fvisibility=hidden \
    $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$a,code=sm_$a) -gencode arch=compute_75,code=compute_75
$(B)/kernels.o: kernels.cu backend.h shaders/ops.h shaders/quants.h Makefile | $(B)
	$(NVCC) $(NVCC_FLAGS) -c kernels.cu -o $@ 2>$(B)/kernels.log || { cat $(B)/kernels.log >&2; false; }
	@! grep -i 'warning' $(B)/kernels.log >&2
# Registers and memory of each kernel, as ptxas tells them; fails when one spills.
docs/cuda-kernels.md: $(B)/kernels.o tools/cuda_table
	@mkdir -p docs
	@{ echo '# Registers and shared memory of the CUDA kernels'; echo; \
	echo 'Made by `make cuda-table` from what ptxas says. Template arguments: the type of the weight or the cache rows'; \
	echo '(shaders/quants.h), then rows of x or query rows that a block takes. Dynamic shared memory is not in it.'; echo; \
	tools/cuda_table $(B)/kernels.log; } > $@
.PHONY: cuda-table
cuda-table: docs/cuda-kernels.md

lib: $(B)/libengine.a $(B)/libengine.so $(B)/engine.pc

$(B)/libengine.a: $(B)/engine.o
	rm -f $@
	ar rcs $@ $^
# Only engine_* leaves the shared library; the C++ library's templates in it stay inside.
$(B)/libengine.so.$(SOVERSION): $(B)/engine.o
	printf '{ global: engine_*; local: *; };\n' > $(B)/exports.map
	$(CXX) $(OPT) $(LINK) $(LDFLAGS) -shared -Wl,-soname,libengine.so.$(SOVERSION) -Wl,--version-script=$(B)/exports.map $^ -o $@
$(B)/libengine.so: $(B)/libengine.so.$(SOVERSION)
	ln -sf libengine.so.$(SOVERSION) $@
$(B)/engine.pc: engine.h Makefile | $(B)
	printf '%s\n' 'prefix=$(PREFIX)' 'libdir=$${prefix}/lib' 'includedir=$${prefix}/include' '' 'Name: engine' \
	    'Description: runs language models from GGUF files' 'Version: $(VERSION)' 'Cflags: -I$${includedir}' \
	    'Libs: -L$${libdir} -lengine' 'Libs.private: -lstdc++ -lm -pthread' > $@
.PHONY: $(B)/engine.pc

$(B):
	@mkdir -p $@

# The answer alone goes to stdout: what the build says goes to stderr.
run:
	@$(MAKE) --no-print-directory -q all 2>/dev/null || { echo "building, about a minute ..." >&2; \
	    $(MAKE) --no-print-directory -s all >&2; }
	@if [ -t 0 ]; then exec $(B)/engine chat "$(MODEL)"; else exec $(B)/engine run "$(MODEL)"; fi

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

install: all lib
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/share/doc/engine
	install -m 755 $(B)/engine $(DESTDIR)$(PREFIX)/bin/engine
	install -m 644 engine.h $(DESTDIR)$(PREFIX)/include/engine.h
	install -m 644 $(B)/libengine.a $(DESTDIR)$(PREFIX)/lib/libengine.a
	install -m 755 $(B)/libengine.so.$(SOVERSION) $(DESTDIR)$(PREFIX)/lib/libengine.so.$(SOVERSION)
	ln -sf libengine.so.$(SOVERSION) $(DESTDIR)$(PREFIX)/lib/libengine.so
	install -m 644 $(B)/engine.pc $(DESTDIR)$(PREFIX)/lib/pkgconfig/engine.pc
	install -m 644 README.md LICENSE $(DESTDIR)$(PREFIX)/share/doc/engine

uninstall:
	cd $(DESTDIR)$(PREFIX) && rm -f bin/engine include/engine.h lib/libengine.a lib/libengine.so lib/libengine.so.$(SOVERSION) lib/pkgconfig/engine.pc
	rm -rf $(DESTDIR)$(PREFIX)/share/doc/engine

info:
	@echo "engine $(VERSION), config $(config), in $(B)"
	@echo "compiler     $(shell $(CXX) --version 2>/dev/null | head -n 1)"
	@echo "static C++   $(if $(LINK_STATIC),found,absent)"
	@echo "libedit      $(if $(EDIT_LIBS),found$(if $(findstring Bstatic,$(EDIT_LIBS)), (static)),absent: chat has no line editing)"
	@echo "gtest        $(if $(call try,-lgtest -pthread,$(H)include <gtest/gtest.h>),found,absent: needed by make test)"
	@echo "json         $(if $(call try,,$(H)include <nlohmann/json.hpp>),found,absent: needed by make test)"
	@echo "node         $(if $(call has,node),found,absent: some tests are skipped)"
	@echo "npm packages $(if $(wildcard tests/node_modules/node-llama-cpp),found,absent: make deps)"
	@echo "nvcc         $(if $(NVCC),found$(if $(filter yes,$(cuda)),$(comma) in use),absent)"
	@echo "glslc        $(if $(call has,glslc),found,absent)"
	@echo "vulkan.h     $(if $(call try,,$(H)include <vulkan/vulkan.h>),found,absent)"

size: $(B)/engine
	@strip -o $(B)/engine.stripped $< && stat -c '%n: %s bytes, stripped' $(B)/engine.stripped

clean:
	rm -rf build engine

# ---- tests -----------------------------------------------------------------------------------------------------------
# All unit tests and the engine are one translation unit, so that they see its static functions and the engine is
# compiled once more, not once per suite. Two suites see the engine from outside only, and in release builds only:
# test_cli spawns the program, test_build looks at the library, the examples and the install.

OUTSIDE := tests/test_cli.cpp tests/test_build.cpp tests/test_cuda.cpp
UNIT_TESTS := $(filter-out $(OUTSIDE),$(sort $(wildcard tests/test_*.cpp)))
OUTSIDE_TESTS := $(if $(filter release,$(config)),$(patsubst tests/%.cpp,$(B)/%,$(filter-out $(if $(CUDA_INC),,%/test_cuda.cpp),$(wildcard $(OUTSIDE)))))
TEST_LINK := $(LINK) -lgtest -lgtest_main -ldl

$(B)/unit.cpp: $(UNIT_TESTS) Makefile | $(B)
	@for t in $(UNIT_TESTS); do echo "#include \"../../$$t\""; done > $@
# g++ expects headers to have no unnamed namespace and takes an included engine.cpp for one.
$(B)/unit.o: $(B)/unit.cpp
	$(CXX) $(BASE) $(if $(CLANG),,-Wno-subobject-linkage) $(TEST_OPT) $(DEPFLAGS) $(CXXFLAGS) -c $< -o $@
$(B)/unit: $(B)/unit.o
	$(CXX) $(OPT) $(LDFLAGS) $^ -o $@ $(TEST_LINK)
$(B)/test_%: tests/test_%.cpp Makefile | $(B)
	$(CXX) $(BASE) -O1 $(filter -fsanitize% -fno-sanitize%,$(OPT)) $(DEPFLAGS) $(CXXFLAGS) $< -o $@ $(TEST_LINK)
# test_cuda: kernels.cu as ordinary C++, on the simulator of tests/cusim. In the sanitizers' builds all of it is watched;
# build/tsan/test_cuda_tsan is clang's, whose kernels alone are.
SIM_FLAGS = -std=c++17 -pthread -ffp-contract=off -fno-strict-aliasing $(WARN) -Wno-unknown-pragmas -isystem $(CUDA_INC) -I.
SIM_OPT := -O1 -g1 $(filter -fsanitize% -fno-sanitize%,$(OPT))
$(B)/cusim.o: tests/cusim/cusim.cpp Makefile | $(B)
	$(CXX) $(SIM_FLAGS) $(SIM_OPT) $(DEPFLAGS) $(CXXFLAGS) -c $< -o $@
$(B)/kernels_sim.o: kernels.cu Makefile | $(B)
	$(CXX) $(SIM_FLAGS) $(SIM_OPT) $(DEPFLAGS) $(CXXFLAGS) -x c++ -c $< -o $@
$(B)/test_cuda: tests/test_cuda.cpp $(B)/kernels_sim.o $(B)/cusim.o Makefile | $(B)
	$(CXX) $(BASE) $(if $(CLANG),,-Wno-subobject-linkage) $(SIM_OPT) $(DEPFLAGS) $(CXXFLAGS) $< $(B)/kernels_sim.o $(B)/cusim.o -o $@ $(TEST_LINK)
build/tsan/test_cuda_outer.o: tests/test_cuda.cpp Makefile
	@mkdir -p build/tsan
	clang++ -std=c++20 -pthread -O1 -MMD -MP -MT $@ -MF $@.d -c $< -o $@
build/tsan/cusim_tsan.o: tests/cusim/cusim.cpp Makefile
	@mkdir -p build/tsan
	clang++ $(SIM_FLAGS) -O1 -g1 -DCUSIM_TSAN -MMD -MP -MT $@ -MF $@.d -c $< -o $@
build/tsan/test_cuda_tsan: kernels.cu build/tsan/test_cuda_outer.o build/tsan/cusim_tsan.o
	clang++ $(SIM_FLAGS) -Wno-pass-failed -O1 -g1 -fsanitize=thread -MMD -MP -MT $@ -MF $@.d -x c++ -c $< -o build/tsan/kernels_tsan.o
	clang++ -fsanitize=thread build/tsan/kernels_tsan.o build/tsan/test_cuda_outer.o build/tsan/cusim_tsan.o -o $@ $(TEST_LINK)
# The operations under the address and the thread sanitizer, and copies of the kernels without a barrier.
.PHONY: test-cuda-long
test-cuda-long:
	@$(MAKE) --no-print-directory config=sanitize build/sanitize/test_cuda
	@$(MAKE) --no-print-directory build/tsan/test_cuda_tsan
	@GTEST_FILTER='-*Long' tests/run build/sanitize/test_cuda
	@GTEST_FILTER='*Orders:*Norm:*Embed:*Rope:*RowsAddGlu:*Attend:*Matmul*' tests/run --part build/tsan/test_cuda_tsan
	@tests/cusim/barriers build/tsan $(CUDA_INC)
$(B)/make_model: tools/make_model.cpp Makefile | $(B)
	$(CXX) $(BASE) -O3 $(DEPFLAGS) $(CXXFLAGS) $< -o $@

test-binaries: all lib $(B)/unit $(OUTSIDE_TESTS) $(B)/make_model

# The build folder's name reaches the tests in ENGINE_BUILD.
test: deps
	@$(MAKE) --no-print-directory -j $(shell nproc) test-binaries
	@ENGINE_BUILD=$(B) tests/run $(B)/unit $(OUTSIDE_TESTS)

test-long: deps
	@$(MAKE) --no-print-directory -j $(shell nproc) test-binaries
	@$(MAKE) --no-print-directory config=sanitize build/sanitize/unit
	@ENGINE_TEST_LONG=1 ENGINE_BUILD=$(B) tests/run $(B)/unit $(OUTSIDE_TESTS) build/sanitize/unit
	@$(if $(CUDA_INC),$(MAKE) --no-print-directory test-cuda-long)

deps:
	@tests/deps

# All fuzz targets and one copy of the engine are one program, which looks at its own name to see what to fuzz: compiling
# the engine with sanitizers takes minutes. tests/fuzz/run gives each target its corpus and FUZZ_SECONDS.
FUZZ_SOURCES := $(sort $(wildcard tests/fuzz/fuzz_*.cpp))
FUZZ_NAMES := $(patsubst tests/fuzz/%.cpp,%,$(FUZZ_SOURCES))
FUZZ_FLAGS := -std=c++20 -pthread -O1 -g1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
build/fuzz/all.cpp: $(FUZZ_SOURCES) Makefile
	@mkdir -p build/fuzz
	@{ echo '#define UNIT_H'; echo '#include "../../engine.cpp"'; \
	for t in $(FUZZ_NAMES); do \
	    echo "#define LLVMFuzzerTestOneInput $$t"; echo "#include \"../../tests/fuzz/$$t.cpp\""; echo '#undef LLVMFuzzerTestOneInput'; \
	done; \
	echo 'static int (*target)(const uint8_t *, size_t);'; \
	echo 'extern "C" int LLVMFuzzerInitialize(int *, char ***argv) {'; \
	for t in $(FUZZ_NAMES); do echo "    if (strstr((*argv)[0], \"$$t\")) target = $$t;"; done; \
	echo '    return 0;'; echo '}'; \
	echo 'extern "C" int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) { return target(p, n); }'; } > $@
build/fuzz/all: build/fuzz/all.cpp
	$(FUZZ_CXX) $(FUZZ_FLAGS) $(DEPFLAGS) $< -o $@
fuzz: build/fuzz/all
	@for t in $(FUZZ_NAMES); do ln -sf all build/fuzz/$$t; done
	@tests/fuzz/run $(FUZZ_SECONDS) $(addprefix build/fuzz/,$(FUZZ_NAMES))

# The files that speed is measured on.
bench-models: $(foreach t,Q4_0 Q4_K_M Q8_0,build/models/llama-1.1b-$(t).gguf)
build/models/llama-1.1b-%.gguf: $(B)/make_model
	@mkdir -p build/models
	$(B)/make_model $@ --preset llama-1.1b --type $*

FORMATTED = $(wildcard *.cpp *.cu *.h shaders/*.h tests/*.cpp tests/*.h tests/cusim/*.cpp tests/cusim/*.h tests/fuzz/*.cpp tools/*.cpp examples/*.c examples/*.cpp)
format:
	clang-format -i $(FORMATTED)
format-check:
	clang-format --dry-run -Werror $(FORMATTED)

-include $(wildcard $(B)/*.d build/fuzz/*.d build/tsan/*_tsan*.d)
