# dtrain. `make help` lists the targets.
.DEFAULT_GOAL := all
MAKEFLAGS += --no-builtin-rules
B        ?= build
PREFIX   ?= /usr/local
CC       ?= cc
WARN     := -Wall -Wextra -Werror
OPT      ?= -O2 -g
SAN      ?=
CPPFLAGS += -D_GNU_SOURCE -Iruntime
CFLAGS   += -std=gnu11 -fPIC $(OPT) $(WARN) -fvisibility=hidden $(SAN)
LDFLAGS  += $(SAN)
LUA_CFLAGS := $(shell pkg-config --cflags lua5.4 2>/dev/null || echo -I/usr/include/lua5.4)
LUA_LIBS := $(shell pkg-config --libs lua5.4 2>/dev/null || echo -llua5.4)
LIBS     := -ldnnl -ljansson -lxxhash -lz -lm -ldl -lpthread

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

MPI_SRC   := $(wildcard runtime/comm/mpi/*.c)
CORE_SRC  := $(filter-out $(MPI_SRC),$(wildcard runtime/*.c runtime/*/*.c))
LUA_SRC   := $(filter-out lua/main.c,$(wildcard lua/*.c))
KERN_SRC  := $(wildcard kernels/cpu/*.c)
TEST_SRC  := $(wildcard tests/c/test_*.c)
STDLIB    := $(shell find stdlib -name '*.lua' 2>/dev/null | LC_ALL=C sort)

CORE_OBJ := $(CORE_SRC:%.c=$(B)/o/%.o)
LUA_OBJ  := $(LUA_SRC:%.c=$(B)/o/%.o)
KERN_OBJ := $(foreach i,$(ISAS),$(KERN_SRC:%.c=$(B)/o/$(i)/%.o))
TESTS    := $(TEST_SRC:tests/c/%.c=$(B)/tests/%)

all: $(B)/dtrain $(B)/dtrain.so $(B)/libdtrain_mpi.so ## build/dtrain, build/dtrain.so for a stock lua5.4, the MPI plug-in

$(B)/o/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@
$(B)/o/lua/%.o: lua/%.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LUA_CFLAGS) -MMD -MP -c $< -o $@
define isa_rule
$(B)/o/$(1)/kernels/cpu/%.o: kernels/cpu/%.c
	@mkdir -p $$(@D)
	$$(CC) $$(CPPFLAGS) $$(CFLAGS) $$(KFLAGS) $$(isa_$(1)) -DK_ISA=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$(i))))
# which instruction sets the table chooser may refer to
$(B)/o/runtime/dev/cpu.o: CPPFLAGS += $(foreach i,$(ISAS),-DK_HAVE_$(i))

$(B)/libdtrain_core.a: $(CORE_OBJ) $(KERN_OBJ)
	@rm -f $@
	ar rcs $@ $^

$(B)/stdlib.c: tests/tools/embed.lua $(STDLIB)
	@mkdir -p $(@D)
	lua5.4 tests/tools/embed.lua $@ stdlib $(STDLIB)
$(B)/o/stdlib.o: $(B)/stdlib.c
	$(CC) $(CFLAGS) -c $< -o $@

$(B)/dtrain: $(B)/o/lua/main.o $(LUA_OBJ) $(B)/o/stdlib.o $(B)/libdtrain_core.a
	$(CC) $(LDFLAGS) -rdynamic -o $@ $^ $(LUA_LIBS) -ledit $(LIBS)
$(B)/dtrain.so: $(LUA_OBJ) $(B)/o/stdlib.o $(B)/libdtrain_core.a
	$(CC) $(LDFLAGS) -shared -o $@ $(LUA_OBJ) $(B)/o/stdlib.o $(B)/libdtrain_core.a $(LIBS)
$(B)/libdtrain_mpi.so: $(MPI_SRC)
	@mkdir -p $(@D)
	OMPI_CC="$(CC)" mpicc $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -shared -MMD -MP -MF $(B)/mpi.d -o $@ $(MPI_SRC)

$(B)/tests/%: tests/c/%.c $(B)/libdtrain_core.a
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -MMD -MP -rdynamic -o $@ $< $(B)/libdtrain_core.a $(LIBS)
tests-c: $(TESTS)

-include $(CORE_OBJ:.o=.d) $(LUA_OBJ:.o=.d) $(KERN_OBJ:.o=.d) $(TESTS:=.d) $(B)/o/lua/main.d $(B)/mpi.d
.PHONY: all tests-c
