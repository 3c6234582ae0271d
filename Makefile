# dtrain. `make help` lists the targets; `make`, `make demo` and `make test` are all that most people need.
.DEFAULT_GOAL := all
MAKEFLAGS += --no-builtin-rules
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc) --no-print-directory
endif
B        ?= build
PREFIX   ?= /usr/local
CC       ?= cc
CXX      ?= c++
# ccache serves both
EMU_CXX  := $(if $(filter ccache,$(firstword $(CC))),ccache) $(CXX)
WARN     := -Wall -Wextra -Werror
OPT      ?= -O2 -g
SAN      ?=
V        ?=
Q        := $(if $(V),,@)
CPPFLAGS += -D_GNU_SOURCE -Iruntime
CFLAGS   += -std=gnu11 -fPIC $(OPT) $(WARN) -fvisibility=hidden $(SAN)
LDFLAGS  += $(SAN)
LUA_CFLAGS := $(shell pkg-config --cflags lua5.4 2>/dev/null || echo -I/usr/include/lua5.4)
LUA_LIBS := $(shell pkg-config --libs lua5.4 2>/dev/null || echo -llua5.4)
LIBS     := -ljansson -lxxhash -lz -lm -ldl -lpthread

# kernels are compiled once per instruction set and chosen at start
MACHINE := $(shell uname -m)
ifeq ($(MACHINE),x86_64)
ISAS := portable avx2 avx512
else
ISAS := portable
endif
isa_portable :=
isa_avx2     := -mavx2 -mfma -mf16c
isa_avx512   := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512
KFLAGS := -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast
# merged products and sums are written out there: an element must not depend on which of a loop's copies computes it
# and integers wrap around
kflags_vm := -ffp-contract=off -fwrapv

# the CUDA plug-in, where there is a toolkit: CUDA_HOME names another, CUDA=0 leaves it out
CUDA_HOME ?= /usr/local/cuda
NVCC      := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
NVCC_RUN  = $(if $(filter ccache,$(firstword $(CC))),ccache) $(NVCC)
CUDA      ?= $(if $(NVCC),1,0)
CUDA_ARCH ?= 80 90 100

MPI_SRC   := $(wildcard runtime/comm/mpi/*.c)
CUDA_SRC  := $(wildcard runtime/dev/cuda/*.c runtime/comm/nccl/*.c)
CUDA_KERN := $(wildcard kernels/cuda/*.cu)
EMU_SRC   := $(wildcard tests/cuda_emu/*.c tests/cuda_emu/*.cpp)
CORE_SRC  := $(filter-out $(MPI_SRC),$(wildcard runtime/*.c runtime/*/*.c))
LUA_SRC   := $(filter-out lua/main.c,$(wildcard lua/*.c))
KERN_SRC  := $(wildcard kernels/cpu/*.c)
TEST_SRC  := $(wildcard tests/c/test_*.c tests/dist/dist_*.c)
FUZZ_SRC  := $(wildcard tests/fuzz/fuzz_*.c)
STDLIB    := $(shell find stdlib -name '*.lua' 2>/dev/null | LC_ALL=C sort)

CORE_OBJ := $(CORE_SRC:%.c=$(B)/o/%.o)
LUA_OBJ  := $(LUA_SRC:%.c=$(B)/o/%.o)
KERN_OBJ := $(foreach i,$(ISAS),$(KERN_SRC:%.c=$(B)/o/$(i)/%.o))
TESTS    := $(addprefix $(B)/tests/,$(notdir $(TEST_SRC:.c=)))
FUZZ     := $(FUZZ_SRC:tests/fuzz/%.c=$(B)/fuzz/%)

all: $(B)/dtrain $(B)/dtrain.so $(B)/libdtrain_mpi.so $(if $(filter 1,$(CUDA)),$(B)/libdtrain_cuda.so) ## build/dtrain, build/dtrain.so for a stock lua5.4, the plug-ins for MPI and, where nvcc is, for CUDA

# what the build needs, looked for once in each build folder
$(B)/tools.ok: tests/tools/install.sh
	@mkdir -p $(@D)
	@sh tests/tools/install.sh --check build && touch $@
# a build folder is for one compiler and one set of flags
$(B)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(CPPFLAGS) $(CFLAGS) $(KFLAGS) $(LDFLAGS)' | cmp -s - $@ || echo '$(CC) $(CPPFLAGS) $(CFLAGS) $(KFLAGS) $(LDFLAGS)' > $@

$(B)/o/%.o: %.c $(B)/flags | $(B)/tools.ok
	@mkdir -p $(@D)
	@echo "  cc $<"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@
$(B)/o/lua/%.o: lua/%.c $(B)/flags | $(B)/tools.ok
	@mkdir -p $(@D)
	@echo "  cc $<"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(LUA_CFLAGS) -MMD -MP -c $< -o $@
define isa_rule
$(B)/o/$(1)/kernels/cpu/%.o: kernels/cpu/%.c $(B)/flags | $(B)/tools.ok
	@mkdir -p $$(@D)
	@echo "  cc $$< ($(1))"
	$$(Q)$$(CC) $$(CPPFLAGS) $$(CFLAGS) $$(KFLAGS) $$(kflags_$$(*F)) $$(isa_$(1)) -DK_ISA=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$(i))))
# which instruction sets the table chooser may refer to
$(B)/o/runtime/dev/cpu.o: CPPFLAGS += $(foreach i,$(ISAS),-DK_HAVE_$(i))

# lists of files are prerequisites too, so that what is removed from the tree leaves the binary
$(B)/%.list: FORCE
	@mkdir -p $(@D)
	@echo '$($*)' | cmp -s - $@ || echo '$($*)' > $@

$(B)/libdtrain_core.a: $(CORE_OBJ) $(KERN_OBJ) $(B)/CORE_SRC.list $(B)/KERN_SRC.list
	@rm -f $@
	$(Q)ar qcs $@ $(CORE_OBJ) $(KERN_OBJ)

$(B)/stdlib.c: tests/tools/embed.lua $(STDLIB) $(B)/STDLIB.list | $(B)/tools.ok
	@echo "  embed stdlib"
	$(Q)lua5.4 tests/tools/embed.lua $@ stdlib $(STDLIB)
$(B)/o/stdlib.o: $(B)/stdlib.c
	$(Q)$(CC) $(CFLAGS) -c $< -o $@

$(B)/dtrain: $(B)/o/lua/main.o $(LUA_OBJ) $(B)/o/stdlib.o $(B)/libdtrain_core.a $(B)/LUA_SRC.list
	@echo "  link $@"
	$(Q)$(CC) $(LDFLAGS) -rdynamic -o $@ $(filter-out %.list,$^) $(LUA_LIBS) -ledit $(LIBS)
$(B)/dtrain.so: $(LUA_OBJ) $(B)/o/stdlib.o $(B)/libdtrain_core.a $(B)/LUA_SRC.list
	@echo "  link $@"
	$(Q)$(CC) $(LDFLAGS) -shared -o $@ $(filter-out %.list,$^) $(LIBS)
$(B)/libdtrain_mpi.so: $(MPI_SRC) $(B)/flags | $(B)/tools.ok
	@mkdir -p $(@D)
	@echo "  link $@"
	$(Q)OMPI_CC="$(CC)" mpicc $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -shared -MMD -MP -MF $(B)/mpi.d -o $@ $(MPI_SRC)

# ---- the CUDA plug-in, and the same sources on the emulator of tests/cuda_emu ----
NVFLAGS := -std=c++20 -O3 -lineinfo -Iruntime --diag-suppress 177 -Werror all-warnings -Xcompiler -fPIC,-fvisibility=hidden \
  $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(firstword $(CUDA_ARCH)),code=compute_$(firstword $(CUDA_ARCH))
$(B)/o/%.cu.o: %.cu
	@mkdir -p $(@D)
	@echo "  nvcc $<"
	$(Q)$(NVCC_RUN) $(NVFLAGS) -Xptxas -v -MMD -MP -MF $(@:.o=.d) -c $< -o $@ 2> $(@:.o=.usage) || { cat $(@:.o=.usage); rm -f $@; false; }
$(B)/o/cuda/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	@echo "  cc $< (cuda)"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -I$(CUDA_HOME)/include -MMD -MP -c $< -o $@
$(B)/libdtrain_cuda.so: $(CUDA_KERN:%=$(B)/o/%.o) $(CUDA_SRC:%.c=$(B)/o/cuda/%.o) $(B)/libdtrain_core.a
	@echo "  link $@"
	$(Q)$(CXX) -shared -o $@ $^ -L$(CUDA_HOME)/lib64 -L$(CUDA_HOME)/lib -Wl,-rpath,$(CUDA_HOME)/lib64:$(CUDA_HOME)/lib -lcudart_static -lcublasLt -lnccl -lrt $(LIBS)
cuda: $(B)/dtrain $(B)/libdtrain_cuda.so ## the CUDA plug-in alone
cuda-report: cuda ## registers, spills and shared memory of each GPU kernel, and whether they are within bounds
	@sh tests/tools/cuda_report.sh $(B)

EMU_FLAGS := $(CPPFLAGS) -DDT_CUDA_EMU -Itests/cuda_emu/include -Ikernels/cuda -fwrapv $(filter-out -std=%,$(CFLAGS))
# every load and store of a kernel becomes a call of the emulator's
EMU_LOOK := -fsanitize=kernel-address --param asan-instrumentation-with-call-threshold=0 --param asan-stack=0 --param asan-globals=0
$(B)/o/emu/%.cu.o: %.cu $(B)/flags
	@mkdir -p $(@D)
	@echo "  c++ $< (emulator)"
	$(Q)$(EMU_CXX) -std=c++20 $(EMU_FLAGS) $(EMU_LOOK) -MMD -MP -MF $(@:.o=.d) -x c++ -c $< -o $@
$(B)/o/emu/%.cpp.o: %.cpp $(B)/flags
	@mkdir -p $(@D)
	@echo "  c++ $<"
	$(Q)$(EMU_CXX) -std=c++20 $(EMU_FLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(B)/o/emu/%.c.o: %.c $(B)/flags
	@mkdir -p $(@D)
	@echo "  cc $< (emulator)"
	$(Q)$(CC) -std=gnu11 $(EMU_FLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
EMU_OBJ := $(addprefix $(B)/o/emu/,$(addsuffix .o,$(CUDA_KERN) tests/cuda_emu/faults.cu)) $(CUDA_SRC:%=$(B)/o/emu/%.o) $(EMU_SRC:%=$(B)/o/emu/%.o)
$(B)/libdtrain_cuda_emu.so: $(EMU_OBJ) $(B)/libdtrain_core.a
	@echo "  link $@"
	$(Q)$(CXX) $(LDFLAGS) -shared -o $@ $^ $(LIBS)
cuda-emu: $(B)/dtrain $(B)/libdtrain_cuda_emu.so ## the CUDA plug-in on an emulator (no GPU): DT_CUDA=emulator build/dtrain --device cuda ...

define test_rule
$(B)/tests/%: $(1)/%.c $(B)/libdtrain_core.a
	@mkdir -p $$(@D)
	@echo "  link $$@"
	$$(Q)$$(CC) $$(CPPFLAGS) $$(CFLAGS) $$(LDFLAGS) -MMD -MP -rdynamic -o $$@ $$< $(B)/libdtrain_core.a $$(LIBS)
endef
$(foreach d,tests/c tests/dist,$(eval $(call test_rule,$(d))))
tests-c: $(TESTS)

# ---- to use ----
deps: ## install what is missing (Debian packages; as root or with sudo, else prints the one line to run)
	@sh tests/tools/install.sh build test data

demo: deps ## install what is missing, build, train a small GPT on real English on two ranks
	@$(MAKE) all
	@sh tests/tools/ranks 2 $(B)/dtrain examples/gpt_text.lua --preset demo

install: all ## copy to $(DESTDIR)$(PREFIX), default /usr/local
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/dtrain $(DESTDIR)$(PREFIX)/lib/lua/5.4 $(DESTDIR)$(PREFIX)/share/doc/dtrain
	install -m 755 $(B)/dtrain $(DESTDIR)$(PREFIX)/bin/dtrain
	install -m 644 $(B)/libdtrain_mpi.so $(wildcard $(B)/libdtrain_cuda.so) $(DESTDIR)$(PREFIX)/lib/dtrain
	install -m 644 $(B)/dtrain.so $(DESTDIR)$(PREFIX)/lib/lua/5.4/dtrain.so
	install -m 644 README.md LICENSE docs/*.md $(DESTDIR)$(PREFIX)/share/doc/dtrain
	cp -R examples $(DESTDIR)$(PREFIX)/share/doc/dtrain

# ---- to check ----
test: deps ## install what is missing, build, run every test; the last line counts them
	@$(MAKE) all tests-c cuda-emu $(B)/opsdoc
	@tests/run --build $(B)

test-all: deps ## the same, with every combination of strategies instead of a covering set: hours
	@$(MAKE) all tests-c cuda-emu $(B)/opsdoc
	@DT_ALL=1 tests/run --build $(B)

floors: ## who may include whom (docs/tour.md): proved by reading every include
	@sh tests/tools/floors.sh

lint: ## luacheck, and clang-format where it is installed
	@sh tests/tools/lint.sh

docs: $(B)/opsdoc ## write docs/ops.md anew from the op table
	$(B)/opsdoc > $(B)/ops.md && cp $(B)/ops.md docs/ops.md
$(B)/opsdoc: tests/tools/opsdoc.c $(B)/libdtrain_core.a
	@echo "  link $@"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -MMD -MP -rdynamic -o $@ $< $(B)/libdtrain_core.a $(LIBS)

format: ## clang-format every C file in place
	@find runtime kernels lua tests -name '*.[ch]' | xargs clang-format -i

bench: ## speed and memory beside their floors, and beside PyTorch's with DT_PEER_PYTHON=python
	@sh tests/tools/install.sh build bench
	@$(MAKE) all $(B)/bench/matmul_floor $(B)/bench/allreduce $(B)/bench/mpi_init
	@DT_BUILD=$(B) lua5.4 tests/bench/run.lua $(WORK)
$(B)/bench/matmul_floor: tests/bench/matmul_floor.c
	@mkdir -p $(@D)
	@echo "  link $@"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $< -ldnnl
$(B)/bench/%: tests/bench/%.c $(B)/libdtrain_core.a
	@mkdir -p $(@D)
	@echo "  link $@"
	$(Q)OMPI_CC="$(CC)" mpicc $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -rdynamic -o $@ $< $(B)/libdtrain_core.a $(LIBS)

asan: ## C tests and a few scripts under AddressSanitizer and the leak checker, in build-asan/
	@$(MAKE) B=build-asan CUDA=0 OPT="-O1 -g -fno-omit-frame-pointer" SAN=-fsanitize=address all tests-c
	@sh tests/tools/sanitized.sh build-asan

ubsan: ## the same under UndefinedBehaviorSanitizer, in build-ubsan/
	@$(MAKE) B=build-ubsan CUDA=0 OPT="-O1 -g" SAN="-fsanitize=undefined -fno-sanitize-recover=undefined" all tests-c
	@sh tests/tools/sanitized.sh build-ubsan

FUZZ_SECONDS ?= 20
fuzz: ## feed the readers of files broken input, FUZZ_SECONDS=20 each, with clang's libFuzzer, in build-fuzz/
	@if command -v clang > /dev/null; then \
	  $(MAKE) B=build-fuzz CC=clang WARN= OPT="-O1 -g" SAN="-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined" fuzzers && \
	  sh tests/tools/fuzz.sh build-fuzz $(FUZZ_SECONDS); \
	else echo "skip fuzz: clang is not installed"; echo "0 passed, 0 failed, 1 skipped"; fi
fuzzers: $(FUZZ)
# readers of files stand on the lowest floors; kernels aren't built for them
FUZZ_OBJ := $(filter $(B)/o/runtime/base/% $(B)/o/runtime/tensor/% $(B)/o/runtime/data/% $(B)/o/runtime/store/safetensors.o $(B)/o/runtime/store/manifest.o,$(CORE_OBJ))
$(B)/libreaders.a: $(FUZZ_OBJ) $(B)/CORE_SRC.list
	@rm -f $@
	$(Q)ar qcs $@ $(FUZZ_OBJ)
$(B)/fuzz/%: tests/fuzz/%.c $(B)/libreaders.a
	@mkdir -p $(@D)
	@echo "  link $@"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -fsanitize=fuzzer -o $@ $< $(B)/libreaders.a $(LIBS)

# ---- to find one's way ----
op: ## where an op lives: make op NAME=layer_norm
	@sh tests/tools/op.sh $(NAME)

clean: ## remove the build folders
	rm -rf build build-asan build-ubsan build-fuzz

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '  make %-9s %s\n' "$$name" "$$text"; done

FORCE:
-include $(CORE_OBJ:.o=.d) $(LUA_OBJ:.o=.d) $(KERN_OBJ:.o=.d) $(TESTS:=.d) $(B)/o/lua/main.d $(B)/mpi.d $(B)/opsdoc.d $(EMU_OBJ:.o=.d) $(CUDA_KERN:%=$(B)/o/%.d) $(CUDA_SRC:%.c=$(B)/o/cuda/%.d)
.PHONY: all cuda cuda-emu cuda-report tests-c deps demo install test test-all floors lint docs format bench asan ubsan fuzz fuzzers op clean help FORCE
