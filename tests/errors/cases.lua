-- Mistakes that people make, and what each must be answered with. tests/lua/bad_input_spec.lua runs them.
--
-- A case is a script (bad.lua) in an empty folder and the words after its name. The script is a small whole job of which some keys
-- are replaced, or any text (script = ...). `says` is a Lua pattern for the message: what was wrong, then what to do. `line` is the
-- line in bad.lua that the message must name. files: name -> contents. ranks: also run on that many ranks, where every rank
-- must end within seconds. env: variables of the environment. plan: it is planned for so many ranks, not run. makes: a file that the run may leave behind.
local M = { list = {} }

local order = { "before", "model", "loss", "data", "batch", "optimizer", "steps" }
local line_of = { before = 3, job = 4, model = 5, loss = 6, data = 7, batch = 8, optimizer = 9, steps = 10, more = 11 }
local usual = {
  model = "nn.Linear(10, 5)", loss = "nn.MSE()", data = "data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100 }",
  batch = "32", optimizer = "optim.SGD { lr = 0.01 }", steps = "3", before = "",
}

--- The script of a case.
function M.script(case)
  if case.script then return case.script end
  local lines = { 'local dt = require "dtrain"', "local nn, optim, data = dt.nn, dt.optim, dt.data" }
  for _, key in ipairs(order) do
    local text = case[key] or usual[key]
    if key == "model" then lines[#lines + 1] = "return dt.job {" end
    lines[#lines + 1] = key == "before" and text or ("  %s = %s,"):format(key, text)
  end
  lines[#lines + 1] = "  " .. (case.more or "")
  lines[#lines + 1] = "}"
  return table.concat(lines, "\n") .. "\n"
end

local function case(name, c)
  c.name = name
  c.line = line_of[c.line] or c.line
  M.list[#M.list + 1] = c
end

local function u32(n) return (">I4"):pack(n) end
local function idx_images(n, bytes) return u32(0x00000803) .. u32(n) .. u32(4) .. u32(4) .. ("\1"):rep(bytes) end
local function idx_labels(n, bytes) return u32(0x00000801) .. u32(n) .. ("\1"):rep(bytes) end
local idx = 'data.idx { images = "x.idx", labels = "y.idx", transforms = { data.flatten() } }'

-- ---- names and options ----
case("unknown key of the job", { more = "learning_rate = 1,", line = "job", says = "no option 'learning_rate'; did you mean '", ranks = 2 })
case("misspelt key of the job", { more = "precison = 'bf16',", line = "job", says = "no option 'precison'; did you mean 'precision'" })
case("missing model", { model = "nil", line = "job", says = "needs 'model'.*missing", ranks = 2 })
case("missing loss", { loss = "nil", line = "job", says = "needs 'loss'.*missing" })
case("missing optimizer", { optimizer = "nil", line = "job", says = "needs 'optimizer'.*missing" })
case("missing data", { data = "nil", line = "job", says = "needs 'data'.*missing" })
case("missing steps", { steps = "nil", line = "job", says = "steps or epochs, or %-%-steps" })
case("unknown precision", { more = "precision = 'fp16',", line = "job", says = "fp16.*did you mean 'f16'" })
case("unknown layer", { model = "nn.Lnear(10, 5)", line = "model", says = "nn.Lnear does not exist; did you mean 'nn.Linear'" })
case("unknown optimizer", { optimizer = "optim.Adamw { lr = 1 }", line = "optimizer", says = "did you mean 'optim.AdamW'" })
case("unknown data set", { data = "data.mnist {}", line = "data", says = "data.mnist does not exist; did you mean 'data%." })
case("unknown operation", { before = "dt.sofmax(dt.zeros { 2 })", line = "before", says = "did you mean 'dt.softmax'" })
case("unknown option of an optimizer", { optimizer = "optim.SGD { lr = 1, momentm = 0.9 }", line = "optimizer",
  says = "no option 'momentm'; did you mean 'momentum'" })
case("unknown option of a layer", { model = "nn.Linear(10, 5, { biass = false })", line = "model", says = "no option 'biass'; did you mean 'bias'" })
case("unknown option of a data set", { data = "data.synthetic { input = { 10 } }", line = "data", says = "did you mean 'inputs'" })
case("unknown metric", { more = "eval = { data = data.synthetic { inputs = {10}, targets = {5} }, metrics = { 'acuracy' } },", line = "job",
  says = "no metric 'acuracy'; did you mean 'accuracy'" })
case("no learning rate", { optimizer = "optim.define { update = function(p) return p end } {}", line = "optimizer", says = "needs a learning rate; write" })
case("negative learning rate", { optimizer = "optim.SGD { lr = -1 }", line = "optimizer", says = "lr wants a finite number of at least 0" })
case("betas of another length", { optimizer = "optim.Adam { lr = 1, betas = { 0.9 } }", line = "optimizer", says = "betas wants 2 numbers" })
case("clip of another type", { more = "clip = true,", line = "job", says = "clip wants a finite number" })
case("a class instead of an instance", { model = "nn.ReLU", line = "job", says = "class.*make an instance" })
case("steps and epochs", { more = "epochs = 2,", line = "job", says = "both steps and epochs; give one" })
case("zero batch", { batch = "0", line = "job", says = "batch.*at least 1" })
case("fractional batch", { batch = "2.5", line = "job", says = "batch.*whole number" })
case("micro above global", { batch = "{ global = 4, micro = 8 }", line = "job", says = "micro 8 is more than global 4" })
case("tensor parallelism", { more = "parallel = { tensor = 2 },", line = "job", says = "1 rank does not divide by tensor 2 = 2; 2 ranks would" })
case("another number of ranks than asked for", { more = "parallel = { data = 4 },", line = "job", says = "data = 4.*mpirun %-n 4", ranks = 2 })
case("warm-up longer than the run", { more = "schedule = optim.warmup_cosine { warmup = 20, total = 10 },", line = "more",
  says = "total 10 must be more than warmup 20" })
case("a schedule that is a number", { more = "schedule = 3,", line = "job", says = "schedule" })

-- ---- shapes and types in the model ----
case("wrong width between layers", { model = "nn.Sequential { nn.Linear(10, 20), nn.ReLU(), nn.Linear(30, 5) }", line = "model",
  says = "20.*30", ranks = 2 })
case("model for other inputs", { model = "nn.Linear(12, 5)", line = "model", says = "10.*12", ranks = 2 })
case("output and targets of other shapes", { model = "nn.Linear(10, 7)", says = "7.*5", ranks = 2 })
case("width not divisible by heads", { line = "model",
  model = "nn.GPT { vocab = 50, layers = 1, heads = 12, width = 770, context = 8 }",
  data = "data.synthetic { tokens = 50, context = 8 }", loss = "nn.CrossEntropy()", says = "width 770.*heads 12; 768 or 780 would", ranks = 2 })
case("context longer than the model's", { line = "model", loss = "nn.CrossEntropy()",
  model = "nn.GPT { vocab = 50, layers = 1, heads = 2, width = 8, context = 8 }", data = "data.synthetic { tokens = 50, context = 16 }",
  says = "16 tokens.*context is 8" })
case("labels for a loss of numbers", { data = "data.synthetic { inputs = { 10 }, classes = 5 }", says = "targets are {32}; their shapes must be equal" })
case("numbers for a loss of labels", { loss = "nn.CrossEntropy()", says = ";" })
case("a kernel larger than the image", { model = "nn.Conv2d(1, 4, 9)", line = "model",
  data = "data.synthetic { inputs = { 1, 5, 5 }, classes = 4 }", loss = "nn.CrossEntropy()", says = "9" })
case("channels that groups do not divide", { model = "nn.Conv2d(3, 4, 3, { groups = 2 })", line = "model", says = "groups" })
case("comparing a symbolic tensor", { line = 3, ranks = 2,
  before = "local M = nn.module 'M' function M:init() self.l = nn.Linear(10, 5) end function M:forward(x) if x > 0 then x = -x end return self.l(x) end",
  model = "M()", says = "symbolic tensor has no value to compare.*dt.where" })
case("item of a symbolic tensor", { line = 3,
  before = "local M = nn.module 'M' function M:init() self.l = nn.Linear(10, 5) end function M:forward(x) return self.l(x) * x:item() end",
  model = "M()", says = "item" })
case("forward is missing", { before = "local M = nn.module 'M'", model = "M()", says = "M has no forward; define function M:forward" })
case("forward returns nothing", { before = "local M = nn.module 'M' function M:forward() end", model = "M()", says = "forward returned nothing; it must" })
case("calling a value", { model = "nn.Linear(10, 5)()", says = "must be a tensor" , line = "model" })
case("a loss that is no scalar", { loss = "function(y, t) return (y - t) * (y - t) end", says = "scalar" })
case("a Lua error in forward", { line = 3, ranks = 2,
  before = "local M = nn.module 'M' function M:forward(x) return x + nothing.at.all end", model = "M()", says = "nothing" })
case("tensors of other shapes", { before = "local z = dt.zeros { 2, 3 } + dt.zeros { 2, 4 }", line = "before",
  says = "3 and 4.*;" })
case("a dim that is not there", { before = "local z = dt.zeros({ 2, 3 }):sum(5)", line = "before", says = "no dim 5" })
case("reshape to another size", { before = "local z = dt.zeros({ 2, 3 }):reshape { 4, 2 }", line = "before", says = "6.*8" })
case("an unknown dtype", { before = "local z = dt.zeros({ 2 }, 'float8')", line = "before", says = "float8.*;" })
case("a ragged list", { before = "local z = dt.tensor { { 1, 2 }, { 3 } }", line = "before", says = "needs equal lengths" })
case("an optimizer that returns nothing", { before = "local O = optim.define { update = function(p, g, s, h) end }",
  optimizer = "O { lr = 1 }", says = "update must return the new parameter" })
case("an optimizer's unknown state", { before = "local O = optim.define { state = { 'm' }, update = function(p, g, s, h) return p - s.mm end }",
  optimizer = "O { lr = 1 }", line = 3, says = "no state 'mm'; did you mean 'm'" })
case("nothing to train", { model = "nn.ReLU()", data = "data.synthetic { inputs = { 5 }, targets = { 5 } }", says = "no trainable parameter" })

-- ---- files ----
case("missing IDX file", { data = idx, line = "data", says = "x.idx.*;", ranks = 2 })
case("truncated IDX file", { data = idx, line = "data", files = { ["x.idx"] = idx_images(10, 100), ["y.idx"] = idx_labels(10, 10) },
  says = "x.idx.*;", ranks = 2 })
case("no IDX file", { data = idx, line = "data", files = { ["x.idx"] = "hello, world, this is text", ["y.idx"] = idx_labels(10, 10) },
  says = "x.idx.*IDX.*;" })
case("more images than labels", { data = idx, line = "data",
  files = { ["x.idx"] = idx_images(10, 160), ["y.idx"] = idx_labels(9, 9) }, says = "10.*9", ranks = 2 })
case("empty IDX file", { data = idx, line = "data", files = { ["x.idx"] = "", ["y.idx"] = "" }, says = "x.idx" })
case("label beyond the classes", { data = idx, model = "nn.Linear(16, 3)", loss = "nn.CrossEntropy()", ranks = 2,
  files = { ["x.idx"] = idx_images(40, 640), ["y.idx"] = u32(0x00000801) .. u32(40) .. ("\7"):rep(40) }, says = "label 7 is outside 0 to 2.*;" })
case("text shorter than the context", { data = "data.text { file = 'a.txt', context = 100 }", files = { ["a.txt"] = "short" },
  line = "data", says = "5 bytes.*101", ranks = 2 })
case("missing text file", { data = "data.text { file = 'none.txt', context = 8 }", line = "data", says = "none.txt.*;", ranks = 2 })
case("a folder instead of a file", { data = "data.text { file = '.', context = 8 }", line = "data", says = ";" })
case("bad .npy", { data = "data.npy { inputs = 'x.npy' }", files = { ["x.npy"] = "\x93NUMPY\1\0\x10\0{'descr': '<f4'" }, line = "data",
  says = "x.npy.*;" })
case("no .npy", { data = "data.npy { inputs = 'x.npy' }", files = { ["x.npy"] = "nothing of the kind" }, line = "data", says = "x.npy.*;" })
case("CSV with a word among numbers", { data = "data.csv { file = 'x.csv', targets = 'b' }", line = "data",
  files = { ["x.csv"] = "a,b\n1,2\n3,four\n" }, says = "x.csv.*3.*four" })
case("CSV without the column", { data = "data.csv { file = 'x.csv', targets = 'c' }", line = "data",
  files = { ["x.csv"] = "a,b\n1,2\n" }, says = 'no column "c"'  })
case("CSV with a short line", { data = "data.csv { file = 'x.csv', targets = 'b' }", line = "data",
  files = { ["x.csv"] = "a,b\n1,2\n3\n" }, says = "x.csv" })
case("CIFAR file of an odd size", { data = "data.cifar10 { files = { 'x.bin' } }", line = "data", files = { ["x.bin"] = ("x"):rep(5000) },
  says = "x.bin.*3073" })
case("a split of more than all", { data = "data.synthetic { inputs = {10}, targets = {5}, split = { train = 0.9, valid = 0.2 } }",
  line = "data", says = "add up to 1.1" })
case("a negative split", { data = "data.synthetic { inputs = {10}, targets = {5}, split = { train = -1 } }", line = "data",
  says = "train wants a finite number above 0" })
case("bad safetensors", { before = "dt.load 'x.safetensors'", files = { ["x.safetensors"] = ("\255"):rep(40) }, line = "before",
  says = "x.safetensors.*;" })
case("load of an unknown kind", { before = "dt.load 'x.pt'", files = { ["x.pt"] = "abc" }, line = "before", says = "x.pt" })
case("save to a folder that is not there", { before = "dt.save('no/such/x.safetensors', { a = dt.zeros { 2 } })", line = "before",
  says = "no/such" })
case("a data function that fails", { data = "data.from(function(i) if i == 7 then error 'seven is bad' end return { 1.5, 2 }, { 3.5 } end, 20)",
  model = "nn.Linear(2, 1)", line = "data", says = "seven is bad", ranks = 2 })
case("a data function of changing shape", { model = "nn.Linear(2, 1)", line = "data", says = "",
  data = "data.from(function(i) return i == 5 and { 1.5, 2, 3 } or { 1.5, 2 }, { 3.5 } end, 20)" })

-- ---- runs ----
case("more ranks than samples", { data = "data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 1 }", alone = false, ranks = 2,
  line = "job", says = "2 ranks share 1 sample; start at most 1 rank" })
case("non-finite loss", { optimizer = "optim.SGD { lr = 1e30 }", steps = "20", says = "step %d+.*;", ranks = 2 })
case("a NaN from the first step", { loss = "function(y, t) return dt.log(dt.mean(y) * 0 - 1) end", says = "step 1.*log", ranks = 2 })
case("NaN in the data", { data = "data.tensors { inputs = dt.full({ 8, 10 }, 0 / 0), targets = dt.zeros { 8, 5 } }", says = "step 1" })
case("an error on one rank only", { before = "if dt.rank() == dt.size() - 1 then error 'this rank has had enough' end", line = 3,
  says = "this rank has had enough", ranks = 3 })
case("another model on one rank", { model = "nn.Linear(10, 5, { bias = dt.rank() ~= 1 })", alone = false, ranks = 2,
  says = "rank 0.*rank 1.*;" })
case("another learning rate on one rank", { optimizer = "optim.SGD { lr = 0.01, momentum = dt.rank() == 1 and 0.5 or 0.9 }", alone = false,
  ranks = 2, says = "rank 0.*rank 1.*;" })
case("another collective on one rank", { before = "if dt.rank() == 0 then dt.barrier() else dt.all_reduce(dt.zeros { 3 }) end",
  alone = false, ranks = 2, line = 3, says = "different collectives: rank 0 barrier.*rank 1 all_reduce.*;" })
case("collectives of other sizes", { before = "dt.all_reduce(dt.zeros { 3 + dt.rank() })", alone = false, ranks = 2, line = 3,
  says = "different collectives: rank 0 all_reduce sum of f32%[3%].*rank 1 all_reduce sum of f32%[4%].*;" })
case("os.exit with a code in one rank", { before = "if dt.rank() == 1 then os.exit(3) end", alone = false, ranks = 2, says = "" })
case("os.exit as if all were well in one rank", { before = "if dt.rank() == 1 then os.exit(0) end", alone = false, ranks = 2,
  says = "rank 1 at the end of the program.*;" })
case("one rank leaves the loop early", { alone = false, ranks = 2, says = "disagree on a collective: rank 0.*rank 1.*;", script = [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local engine = dt.engine(dt.job { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 32, optimizer = optim.SGD { lr = 0.01 },
  data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100 }, steps = 9 })
for step, batch in engine:batches() do
  if step == 4 and dt.rank() == 1 then break end
  engine:step(batch)
end
]] })
case("a rank is killed", { alone = false, ranks = 2, says = "", script = [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local engine = dt.engine(dt.job { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 32, optimizer = optim.SGD { lr = 0.01 },
  data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100 }, steps = 9 })
for step, batch in engine:batches() do
  if step == 4 and dt.rank() == 1 then os.execute("kill -9 $PPID") end
  engine:step(batch)
end
]] })
case("broadcast from a rank that is not there", { before = "dt.broadcast(dt.zeros { 2 }, 7)", line = "before", says = "7", ranks = 2 })
case("an error in a loop of one's own", { ranks = 2, line = 8, says = "out of patience", script = [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local engine = dt.engine(dt.job { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 32, optimizer = optim.SGD { lr = 0.01 },
  data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100 }, steps = 9 })
for step, batch in engine:batches() do
  engine:step(batch)
  if step == 3 and dt.rank() == dt.size() - 1 then
    error("out of patience")
  end
end
]] })
case("resume without a folder", { words = "--resume auto", says = "resume auto.*checkpoint", line = "job" })
case("resume from what is not there", { words = "--resume none/at/all", says = "none/at/all", ranks = 2 })
case("resume from what is no checkpoint", { words = "--resume old", files = { ["old/manifest.json"] = "{", ["old/x"] = "" }, says = "old", ranks = 2 })
case("out where a file is", { words = "--out x", files = { x = "a file" }, says = "x", ranks = 2 })

-- ---- the command line ----
case("unknown option", { words = "--stepz 3", says = "unknown option %-%-stepz; did you mean %-%-steps", ranks = 2 })
case("option without a value", { words = "--steps", says = "%-%-steps needs a value" })
case("steps that is no number", { words = "--steps many", says = "%-%-steps wants a whole number.*'many'" })
case("zero steps", { words = "--steps 0", says = "%-%-steps wants a whole number of at least 1" })
case("unknown device", { words = "--device tpu", says = "device tpu.*cpu" })
case("too many threads", { words = "--threads 100000", says = "threads" })
case("a word too many", { words = "3", says = "unexpected '3'" })
case("both steps and epochs", { words = "--steps 3 --epochs 1", says = "exclude each other" })
case("a script's option of another type", { before = "dt.args { width = 10 }", words = "--width wide", says = "%-%-width wants a whole number, got 'wide'" })
case("a script's option that is misspelt", { before = "dt.args { width = 10 }", words = "--widht 3", says = "did you mean %-%-width" })
case("a choice that is not there", { before = "dt.args { preset = { default = 'a', choices = { 'a', 'b' } } }", words = "--preset c",
  says = "%-%-preset c.*did you mean" })
case("reading an option that was not declared", { before = "local a = dt.args { width = 10 } print(a.widht)", line = "before",
  says = "no 'widht'; did you mean 'width'" })
case("a syntax error", { script = "local dt = require 'dtrain'\nreturn dt.job {{\n", line = 3, says = "expected", ranks = 2 })
case("a script that returns something else", { script = "return 7\n", says = "returned 7.*return dt.job" })
case("a module that is not there", { before = "require 'no.such.module'", line = "before", says = "no.such.module" })
case("an empty error", { before = "error()", says = "error value that is nil" })

-- ---- started or written wrongly ----
case("a split of counts and fractions", { line = "data", says = "split has counts %(90%) beside a fraction %(valid = 0.1%); give",
  data = "data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100, split = { train = 90, valid = 0.1 } }" })
case("a schedule that gives no number late", { more = "schedule = function(step) return step < 90 and 1 or nil end,", steps = "100", line = "job",
  says = "must return a number %(a factor on lr%), got nil at step 9%d" })
case("a job that is not returned", { script = 'local dt = require "dtrain"\nlocal job = dt.job { model = dt.nn.Linear(2, 2), loss = dt.nn.MSE(), batch = 4,'
  .. ' optimizer = dt.optim.SGD { lr = 1 }, data = dt.data.synthetic { inputs = { 2 }, targets = { 2 } }, steps = 1 }\n', line = 2,
  says = "this job was never trained; return it", ranks = 2 })
case("a misspelt global", { before = "local chkpt = { dir = 'x' }", more = "checkpoint = ckpt,", line = "more", ranks = 2,
  says = "the name 'ckpt' was never set; did you mean 'chkpt'%?" })
case("a library that was not named", { before = "print(metrics)", line = "before", says = "'metrics' was never set; did you mean dt%.metrics" })
case("a misspelt global in a file beside the script", { before = "require 'part'", files = { ["part.lua"] = "return wdith" },
  says = "part.lua:1: the name 'wdith' was never set" })
case("math.random in a forward", { line = 3, ranks = 2,
  before = "local M = nn.module 'M' function M:init() self.l = nn.Linear(10, 5) end function M:forward(x) return self.l(x) * math.random() end",
  model = "M()", says = "math.random%(%) in a forward, which runs once: every step would see this one number; draw it before the job" })
case("resume with more than a folder", { script = [[
local dt = require "dtrain"
local engine = dt.engine(dt.job { model = dt.nn.Linear(2, 2), loss = dt.nn.MSE(), batch = 4, optimizer = dt.optim.SGD { lr = 1 },
  data = dt.data.synthetic { inputs = { 2 }, targets = { 2 } }, steps = 1 })
engine:resume("best", { strict = false })
]], line = 4, says = "engine:resume takes a folder and nothing else" })
for _, env in ipairs { "PMI_RANK=0 PMI_SIZE=2", "SLURM_PROCID=1 SLURM_NTASKS=2", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4", "PMIX_RANK=1",
  "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3", "RANK=1 WORLD_SIZE=2" } do
  case("ranks that do not find each other, " .. env, { env = env, says = "one of several %(.-=%d%), but it found no other rank; start it with "
    .. "Open MPI's mpirun %-n %d .-srun %-%-mpi=pmix.-DT_COMM=self" })
end

-- ---- recompute ----
case("recompute is unknown", { more = 'parallel = { recompute = "ful" },', says = "recompute = \"ful\" is unknown; did you mean 'full'?" })
case("recompute has an unknown key", { more = 'parallel = { recompute = { evry = 2 } },', says = "no option 'evry'; did you mean 'every'?" })
case("recompute has two ways", { more = 'parallel = { recompute = { every = 2, budget = 100 } },',
  says = "more than one of every, budget and ops; give one" })
case("recompute of an unknown operation", { more = 'parallel = { recompute = { ops = { "gelu_tan" } } },',
  says = "there is no operation 'gelu_tan'; did you mean 'gelu_tanh'?" })
case("recompute without blocks", { more = 'parallel = { recompute = "full" },', says = "the model has no blocks .-; name operations instead" })
case("recompute of a block that is not there", { model = "nn.Sequential { nn.Linear(10, 5), nn.Tanh() }",
  more = 'parallel = { recompute = { match = "blocks.0" } },', says = "match: no block is named so; did you mean '0'?" })
case("recompute with a budget that is no size", { more = 'parallel = { recompute = { budget = "4 apples" } },',
  says = 'budget "4 apples" is no size; write a number of bytes' })
case("recompute with a budget too small", { model = "nn.Sequential { nn.Linear(10, 5), nn.Tanh() }",
  more = 'parallel = { recompute = { budget = 10 } },', says = "budget 10 bytes cannot be met: .- bytes, .- too many" })

-- ---- parallelism: what cannot be is refused, with a value that works. Two ranks that run, or --ranks of plan ----
local function gpt(o) return ("nn.GPT { vocab = 64, layers = 2, context = 8, %s }"):format(o or "heads = 4, width = 32") end
local mlp = "nn.Sequential { nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 5) }"
local tokens = "data.synthetic { tokens = 64, context = %d, samples = 64 }"
local function parallel(name, text, says, o)
  o = o or {}
  o.more, o.says = ("parallel = { %s },"):format(text), says
  o.line = o.line or "job"
  o.model = o.model or mlp
  if o.model:find "GPT" then o.loss, o.data = "nn.CrossEntropy()", tokens:format(o.context or 8) end
  case(name, o)
end
-- the mesh
parallel("a mesh that is more than the ranks", "data = 2, tensor = 2, pipeline = 2", "data = 2 x pipeline 2 x tensor 2 = 8, but 1 rank run; mpirun %-n 8")
parallel("ranks that the mesh does not divide", "tensor = 2", "3 ranks do not divide by tensor 2 = 2; 2 or 4 ranks would", { plan = 3 })
parallel("an unknown axis in mesh", 'mesh = { "data", "tensr" }', 'there is no axis "tensr"; did you mean \'tensor\'', { plan = 2 })
parallel("an axis that mesh leaves out", 'tensor = 2, mesh = { "data" }', 'leaves out the axis "tensor" of size 2', { plan = 2 })
parallel("an axis twice in mesh", 'mesh = { "data", "data" }', 'names the axis "data" twice', { plan = 2 })

-- ---- limits ----
local many_layers = "(function() local l = {} for i = 1, 70 do l[i] = nn.Linear(10, i == 70 and 5 or 10) end return nn.Sequential(l) end)()"
case("a pipeline of more stages than can be", { model = many_layers, more = "parallel = { pipeline = 65 },", plan = 65, line = "job",
  says = "pipeline = 65; at most 64 ranks can share a pipeline" })
case("more axes than can be", { before = "local s = { name = 'many', axes = function() local l = {} for i = 1, 9 do "
  .. "l[i] = { name = 'a' .. i, size = 1 } end return l end }", more = "parallel = { strategies = { s } },", line = "job",
  says = "have 12 axes %(data, .*a9%); at most 8 can be: make one of two, or leave a strategy out", ranks = 2 })
case("an axis of a long name", { before = "local s = { name = 'long', axes = function() return { { name = ('a'):rep(16), size = 1 } } end }",
  more = "parallel = { strategies = { s } },", line = "job", says = 'strategy long: the name "a+" has 16 letters; at most 15 can be' })
case("more optimizer states than can be", { before = "local O = optim.define { name = 'O', state = { 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i' }, "
  .. "update = function(p, g, s, h) for k in ('abcdefghi'):gmatch '.' do s[k] = s[k] + g end return p - h.lr * g end }",
  optimizer = "O { lr = 0.1 }", line = "job", says = "'weight' has 8 states already; that is the most", ranks = 2 })
case("a reshape to nine dims", { loss = "function(y, t) return dt.mean(y:reshape { -1, 1, 1, 1, 1, 1, 1, 1, 5 }) end", line = "loss",
  says = "reshape: 'shape' has more than 8 numbers; a tensor has at most 8 dims" })
parallel("data that is a word", 'data = "all"', 'data wants "auto" or a number of ranks')
parallel("a misspelt strategy", "tensr = 2", "no option 'tensr'; did you mean 'tensor'")
parallel("tensor = 0", "tensor = 0", "tensor wants a whole number of at least 1, got 0")
parallel("zero = 4", "zero = 4", "zero is 0 %(off%), 1, 2 or 3, got 4")
parallel("resident without zero = 3", "resident = 10", "resident belongs to zero = 3")
-- what tensor parallelism can't divide
parallel("heads that do not divide", "tensor = 3", "attention with 4 heads and 4 key/value heads does not divide by tensor = 3; tensor = 1 or 2 or 4 would",
  { model = gpt "heads = 4, width = 36", plan = 3 })
parallel("key heads that do not divide", "tensor = 2", "attention with 4 heads and 1 key/value heads does not divide by tensor = 2; tensor = 1 would",
  { model = gpt "heads = 4, kv_heads = 1, width = 32", plan = 2 })
parallel("a width that does not divide", "tensor = 3", "parameter 0%.weight: dim 0 has 16, which do not divide among the 3 ranks .-; 15 or 18 would",
  { plan = 3 })
parallel("a model without a product", "tensor = 2", "no product to divide; tensor = 1 works", { model = "function(x) return x:slice { dim = 1, stop = 5 } end", plan = 2 })
parallel("sequence without tensor", "sequence = true", "give tensor = 2 or more")
parallel("a sequence that does not divide", "tensor = 2, sequence = true", "a sequence of 7 does not divide among the 2 ranks .-; 8 would", { model = gpt(), context = 7, plan = 2 })
parallel("sequence without sequences", "tensor = 2, sequence = true", "this model has none, sequence = false works", { plan = 2 })
parallel("an optimizer that reduces a divided parameter", "tensor = 2", "optimizer Max uses max on the parameter 0%.weight as a whole, .- over the axis \"tensor\"; set tensor = 1",
  { optimizer = 'optim.define { name = "Max", update = function(p, g, s, h) return p - h.lr * g / dt.abs(g):max() end } { lr = 1 }', plan = 2, line = "optimizer" })
parallel("an optimizer that reduces a share", "zero = 1", "optimizer Max uses max on the parameter 0%.weight as a whole, .- share of it; set zero = 0",
  { optimizer = 'optim.define { name = "Max", update = function(p, g, s, h) return p - h.lr * g / dt.abs(g):max() end } { lr = 1 }', plan = 2, line = "optimizer" })
-- placements
local function placed(name, where, says, o)
  o = o or {}
  o.line = o.line or "job"
  o.model = ("nn.Sequential { nn.Linear(10, 16, { place = { weight = { %s } } }), nn.GELU(), nn.Linear(16, 5) }"):format(where)
  o.plan = o.plan or 2
  parallel(name, o.parallel or "tensor = 2", says, o)
end
placed("a placement on an unknown axis", 'tenso = "S(0)"', 'place: there is no axis "tenso"; did you mean "tensor"')
placed("a placement that is none", 'tensor = "S0"', 'tensor = "R" %(replicated%) or "S%(dim%)" %(divided by that dim%), got S0')
placed("a partial placement", 'tensor = "P"', 'tensor = "R" %(replicated%) or "S%(dim%)" .-, got P')
placed("a placement that is none, on one rank", 'tensor = "S0"', 'tensor = "R" .- got S0', { parallel = "", plan = 1 })
placed("a placement along a dim that is not there", 'tensor = "S(2)"', "the tensor has dims 0 to 1")
placed("a placement on data", 'data = "S(0)"', 'the axis "data" divides samples by itself; place tensors on another axis')
placed("a placement on pipeline", 'pipeline = "S(0)"', 'the axis "pipeline" divides stages by itself')
placed("a dim cut over two axes", 'tensor = "S(1)", mine = "S(1)"', 'dim 1 has 10, .- 4 ranks of axis "tensor" and those before it; 8 or 12 would', { plan = 4,
  parallel = 'tensor = 2, mesh = { "data", "mine", "tensor" }, strategies = { { axes = function() return { { name = "mine", size = 2 } } end } }' })
parallel("a placement of an unknown parameter", "", "place: there is no parameter 'wieght'; did you mean 'weight'",
  { model = 'nn.Linear(10, 5, { place = { wieght = { tensor = "S(0)" } } })', line = "model" })
parallel("a value that does not divide", "tensor = 3", "place: dim 0 has 32 elements, .- 3 ranks .-; 33 would",
  { model = 'nn.Sequential { nn.Linear(10, 6), function(x) return x:place { tensor = "S(0)" }:slice { dim = 1, stop = 5 } end }', plan = 3, line = "model" })
-- pipelines
parallel("more stages than layers", "pipeline = 4", "pipeline = 4 cuts the model into 4 stages, but only 2 .- pipeline = 2 would do", { plan = 4 })
parallel("chunks that a schedule has not", "pipeline = 2, chunks = 2", 'one chunk on each rank; take schedule = "interleaved"', { plan = 2 })
parallel("chunks without stages", "chunks = 2, schedule = function() end", "chunks = 2, but pipeline = 1; .- set pipeline = 2")
local function schedule(name, body, says)
  parallel("a schedule " .. name, ("pipeline = 2, schedule = function(stage) %s end"):format(body), "schedule of the script.*" .. says,
    { plan = 2, batch = "{ global = 32, micro = 16 }", line = "more" })
end
schedule("that returns nothing", "", "for stage 0 it returned nil; it must return a list")
schedule("of numbers", "return { 1, 2 }", "action 1 is a number; it must return a list")
schedule("of an unknown kind", "return { { 'X', 1 } }", "action 1 is of kind X")
schedule("of a microbatch that is a word", "return { { 'F', 'one' } }", "F of microbatch one; microbatches are 1 to 2")
schedule("of half a microbatch", "return { { 'F', 1.5 } }", "F of microbatch 1.5; microbatches are 1 to 2")
schedule("that repeats", "return { { 'F', 1 }, { 'F', 1 } }", "stage 0 has F1 twice")
schedule("that begins at the end", "return { { 'B', 1 }, { 'F', 1 }, { 'F', 2 }, { 'B', 2 } }", "stage 0 has B1 before F1")
schedule("with W on one stage only", "local t = { { 'F', 1 }, { 'B', 1 }, { 'F', 2 }, { 'B', 2 } } if stage == 0 then t[5], t[6] = { 'W', 1 }, { 'W', 2 } end return t",
  "stage 1 of 2 never runs W1")
schedule("with a chunk that is not there", "return { { 'F', 1, 2 } }", "F1 of chunk 2; chunks are 1 to 1")
schedule("whose action has others with it in turn", "return { { 'F', 1, with = { 'B', 1, with = { 'F', 2 } } } }", "action 1 has an action with it that has others with it itself")
schedule("whose action has a word with it", "return { { 'F', 1, with = 'B1' } }", "action 1 has a string with it")
schedule("whose backward would start with its forward", "return { { 'F', 1, with = { 'B', 1 } }, { 'F', 2 }, { 'B', 2 } }", "stage %d runs B1 together with F1, which it needs")
local function placed_stages(name, body, says, line)
  parallel("a place " .. name, ("pipeline = 2, chunks = 2, schedule = { order = function() return {} end, place = function(stage) return %s end }"):format(body), says,
    { plan = 2, batch = "{ global = 32, micro = 16 }",
      line = line, model = "nn.Sequential { nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5) }" })
end
placed_stages("that names no rank", "'first'", "place gives stage 0 first; a rank of the pipeline is a number from 0", "more")
placed_stages("of a rank that is not there", "stage", "place puts stage 2 on rank 2 of the pipeline; 0 to 1 are there", "more")
placed_stages("that leaves a rank out", "0", "place gives rank 1 of the pipeline no stage; each of the 2 needs one", "more")
placed_stages("with copies of some stages only", "stage == 1 and { 0, 1 } or { 0 }", "place gives stage 1 2 ranks and stage 0 1; all stages lie on equally many", "more")
placed_stages("whose ways end on one rank", "{ stage % 2, 1 }", "rank 1 of the pipeline the last stage twice; each way must end on a rank of its own", "more")
parallel("a schedule without an order", "pipeline = 2, schedule = { place = function() end }", "schedule.*order")
-- gradient hooks, and whose the gradients are
parallel("a hook that is a word", "gradient = { hook = 'bf16' }", 'hook wants a function, got "bf16"')
local function hook(name, body, says, line) parallel("a hook that " .. name, ("gradient = { hook = function(b) %s end }"):format(body), says, { plan = 2, line = line or "more" }) end
hook("changes the shape", "return b:sum()", "hook returned f32 of shape {} for a bucket of shape {%d+}; it must keep the shape")
hook("changes the dtype", "return b:to 'i64'", "hook returned i64 of shape .-; it must keep the shape, in a float dtype")
hook("returns nothing", "", "hook must return the reduced bucket, got nil")
hook("names an unknown axis", "return b:all_reduce 'tenso'", "the mesh has no axis 'tenso'; it has .-data", "job")
local function verb(name, body, says, line) parallel(name, ("strategies = { { %s } }"):format(body), says, { plan = 2, line = line or "job" }) end
verb("a reduce that does not reduce", "reduce = function(b) return b * 2 end", 'what it returns is still a partial sum over "data"; reduce it there', "more")
verb("a reduce that squares first", "reduce = function(b) return b * b end", 'what it returns differs between the ranks of "data"', "more")
verb("a reduce that reduces twice", "reduce = function(b) return b:all_reduce 'data':all_reduce 'data' end", 'sums over "data" what is the same on all its ranks; it was reduced there before')
verb("a reduce that keeps a share of what is whole", "reduce = function(b) return b:reduce_scatter 'data' end", 'what it returns is a share over "data", where the whole is kept')
verb("an update that sums what is reduced", "update = function(e) return e.param - e.grad:all_reduce 'data' end", 'the update: sums over "data" what is the same', "more")
verb("two strategies that reduce", "reduce = function(b) return b:all_reduce 'data' end }, { reduce = function(b) return b:all_reduce 'data' end", "the strategies strategies%[1%] and strategies%[2%] both say reduce; leave one of them out")
verb("buckets that leave a parameter out", "buckets = function(l) return { { l[1].name } } end", "is in no bucket; every parameter of the list must be in one")
verb("buckets with a parameter twice", "buckets = function(l) return { { l[1].name, l[1].name } } end", "is in two buckets")
verb("a keep that mixes axes", "keep = function() return { states = {}, gradients = { 'data' } } end", "states, gradients and parameters are in shares over the same axes, or whole")
verb("two strategies that say one thing of wire", "wire = function() return { bucket_mb = 1 } end }, { wire = function() return { bucket_mb = 2 } end",
  "the strategies strategies%[1%] and strategies%[2%] both say bucket_mb of wire; leave one of them out")
verb("a wire of an unknown key", "wire = function() return { bucketmb = 1 } end", "wire of strategy strategies%[1%] has no option 'bucketmb'; did you mean 'bucket_mb'", "more")
parallel("two ways to recompute", 'recompute = "full", strategies = { { place = function(g) g:recompute { ops = { "gelu" } } end } }', "graph:recompute: what backward makes again was said already; leave one of the two out", { plan = 2 })
verb("a precision that is none", "precision = function() return 'i8' end", "precision of strategy strategies%[1%], for linear: \"f32\", \"bf16\", \"f16\" or nil, got \"i8\"", "more")
verb("two strategies of precision", "precision = function() return 'f32' end }, { precision = function() return 'bf16' end", "strategies%[1%] and strategies%[2%] both say precision")
verb("an update that returns nothing", "update = function() end", "update of strategy strategies%[1%] must return the new value of", "more")
local function rule(name, answer, says)
  parallel("a rule " .. name, ([[strategies = { { axes = function() return { { name = "mine", size = 2 } } end, place = function(g) ]]
    .. [[g:place("inputs", { mine = "S(1)" }) end, rule = function(n) if n.op == "linear" then return %s end end } }]]):format(answer), says,
    { plan = 2, line = "more" })
end
local of_linear = 'rule of strategy strategies%[1%], for linear over "mine": '
rule("that returns a number", "3", of_linear .. "it returns { inputs = places, outputs = places }, or nil; got 3")
rule("without outputs", '{ inputs = { "R", "R", "R" } }', "rule of strategy strategies%[1%] needs 'outputs'")
rule("for some of the inputs", '{ inputs = { "R" }, outputs = { "R" } }', of_linear .. "inputs must be a list of 3 places")
rule("with a place that is none", '{ inputs = { "S1", "R", "R" }, outputs = { "R" } }', of_linear .. 'inputs%[1%] is "R", "S%(dim%)", got "S1"')
rule("with a partial input", '{ inputs = { "P", "R", "R" }, outputs = { "R" } }', of_linear .. 'inputs%[1%] is "R", "S%(dim%)", got "P"')
rule("along a dim that is not there", '{ inputs = { "S(2)", "R", "R" }, outputs = { "R" } }', of_linear .. 'inputs%[1%] = "S%(2%)", but it has 2 dims')
rule("that divides what does not divide", 'n.shape[2] == 5 and { inputs = { "R", "S(0)", "S(0)" }, outputs = { "S(1)" } } or nil',
  of_linear .. 'inputs%[2%] = "S%(0%)", but its dim 0 has 5 elements, which do not divide among 2 ranks; return nil there')
rule("that makes a whole of parts", '{ inputs = { "S(0)", "R", "R" }, outputs = { "R" } }', of_linear .. 'outputs%[1%] = "R", but it is made of divided inputs')
rule("that makes parts of a whole", '{ inputs = { "R", "R", "R" }, outputs = { "S(0)" } }', of_linear .. 'outputs%[1%] = "S%(0%)", but all inputs are whole')
rule("whose result is another", '{ inputs = { "S(0)", "R", "R" }, outputs = { "S(1)" } }',
  "the placement rule for linear %(.-%) makes result 1 f32%[32,8%] on each rank, but .- it becomes f32%[16,16%]")
rule("whose parts do not fit", '{ inputs = { "S(1)", "R", "R" }, outputs = { "P" } }', "the placement rule for linear %(.-%) divides inputs that do not fit then: linear: ")
parallel("two rules for one operation", 'strategies = { { axes = function() return { { name = "mine", size = 2 } } end, rule = function() return {} end }, { rule = function() return {} end } }',
  "the strategies strategies%[1%] and strategies%[2%] both say rule; leave one of them out", { plan = 2 })
parallel("gradients in a dtype that is not the job's", "gradient = { dtype = 'bf16' }", "gradient%.dtype = bf16: gradients travel as f32 in a job of precision f32; precision = \"bf16\" or a hook", { plan = 2 })
parallel("a hook and a dtype", "gradient = { hook = dt.hooks.bf16, dtype = 'bf16' }", "both hook and dtype")
parallel("a hook and replicas that meet", "sync = { every = 2 }, gradient = { hook = dt.hooks.bf16 }", "sync and gradient%.hook: no gradients are exchanged; leave one out")
parallel("a hook and independent replicas", "independent = true, gradient = { hook = dt.hooks.bf16 }", "independent and gradient%.hook: .- leave one out")
parallel("blocks that do not divide the ranks", "gradient = { hook = dt.hooks.hierarchical { inner = 3 } }", "blocks of 3 do not divide 4 ranks; inner = 1 or 4 would", { plan = 4 })
parallel("independent replicas and ZeRO", "independent = true, zero = 1", "independent and zero = 1: .- set zero = 0")
parallel("replicas that meet and ZeRO", "sync = { every = 2 }, zero = 2", "sync and zero = 2: .- set zero = 0")
parallel("replicas that meet by an outer optimizer, and tensor", "sync = { every = 2, outer = optim.SGD { lr = 1 } }, tensor = 2", "sync%.outer works on whole models; set tensor = 1 and pipeline = 1")
parallel("replicas that both meet and do not", "sync = { every = 2 }, independent = true", "both sync and independent; .- leave one out")
parallel("replicas that meet at no time", "sync = {}", "sync needs 'every'")
parallel("an outer optimizer that is none", "sync = { every = 2, outer = 3 }", "outer wants an optimizer such as")
-- strategies of one's own
parallel("a strategy that is none", "strategies = { 3 }", "strategies%[1%] wants a table")
parallel("a strategy with an unknown key", "strategies = { { plac = function() end } }", "no option 'plac'; did you mean 'place'")
parallel("a strategy with a known option", "strategies = { { name = 'mine', options = { { 'zero', 'integer', 0 } } } }", "the option zero of strategy mine is zero's already; give it another name")
parallel("a strategy with a known axis", "strategies = { { name = 'mine', axes = function() return { { name = 'tensor', size = 2 } } end } }", "two strategies add the axis \"tensor\"; give the one of mine", { plan = 2 })
parallel("a strategy whose axis has no size", "strategies = { { axes = function() return { { name = 'm', size = 'x' } } end } }", 'axis 1 of strategy strategies%[1%]: size wants "auto" or a number of ranks, got "x"', { plan = 2 })

-- values that are not finite, labels out of range: the same words in every dtype and in evaluation
for _, dtype in ipairs { "f32", "bf16", "f16" } do
  case("a label out of range in " .. dtype, { model = "nn.Linear(10, 3)", loss = "nn.CrossEntropy()",
    data = "data.tensors { inputs = dt.ones { 8, 10 }, targets = dt.full({ 8 }, 7, 'i64') }", batch = "8", more = "precision = '" .. dtype .. "'",
    says = "cross_entropy: label 7 is outside 0 to 2; labels count from 0", ranks = 2 })
  case("a loss that is NaN in " .. dtype, { loss = "function(y, t) return (y - t):sum():log() * 0 - 1 / dt.zeros {}:to 'f32' end", before = "",
    more = "precision = '" .. dtype .. "'", says = "step 1: the loss is .* first value that is not finite", ranks = 2 })
end
case("an overflow that no loss scale helps", { loss = "function(y, t) return ((y - t) * 1e4):square():mean() end", steps = "100",
  more = "precision = { dtype = 'f16', loss_scale = 1e30 }", says = "20 steps in a row overflowed at a loss scale that shrinks no more" })
-- the rank that is told names the value, whichever rank has it
for _, way in ipairs { "data = 2", "pipeline = 2", "zero = 2" } do
  case("a gradient beyond f32, " .. way, { model = "nn.Sequential { nn.Linear(10, 5), nn.Linear(5, 5) }", alone = false,
    loss = "function(y) return (y * 3e38):mean() * 1e3 end", more = "parallel = { " .. way .. " }",
    says = "step 1: the loss is .*the first value that is not finite came out of", ranks = 2 })
end
case("a label out of range in evaluation", { model = "nn.Linear(10, 3)", loss = "nn.CrossEntropy()",
  data = "{ train = data.synthetic { inputs = { 10 }, classes = 3 }, valid = data.tensors { inputs = dt.ones { 4, 10 }, targets = dt.full({ 4 }, 7, 'i64') } }",
  more = "eval = { metrics = { 'accuracy', 'top_2' } }", says = "label 7 is outside 0 to 2; labels count from 0", ranks = 2 })
-- ids out of range are seen where they are looked up, also where integers come out or nobody reads what does
local looked_up = {
  { "one_hot", "label 150 is outside 0 to 2", "function N:forward(x) return self.l(dt.one_hot(x, { classes = 3 }):to 'f32') end" },
  { "one_hot", "label 150 is outside 0 to 2", "function N:forward(x) return self.l(dt.where(x:lt(0):unsqueeze(-1), dt.one_hot(x, { classes = 3, dtype = 'f32' }), 1)) end" },
  { "gather", "index 150 is outside 0 to 6", "function N:forward(x) return self.l((dt.arange(7):gather(x, 0):to 'f32'):reshape { -1, 1 }:broadcast_to { x:size(0), 3 }) end" },
  { "gather", "index 150 is outside 0 to 6", "function N:forward(x) return self.l(dt.ones { 7, 3 }:gather(x:reshape { -1, 1 }:broadcast_to { x:size(0), 3 }, 0)) end" },
  { "embedding", "id 150 is outside 0 to 4", "function N:forward(x) return self.l(self.e(x)) end" },
}
for i, l in ipairs(looked_up) do
  for _, how in ipairs { "precision = 'f32'", "precision = 'bf16'", "precision = 'f16'", "parallel = { pipeline = 2 }", "parallel = { tensor = 2 }" } do
    if i == 1 or i == 5 or how:find "f32" then
      case(("an id out of range in %s (%d), %s"):format(l[1], i, how), { says = l[1] .. ": " .. l[2], line = "before",
        before = "local N = nn.module 'N'; function N:init() self.l, self.e = nn.Sequential { nn.Linear(3, 4), nn.Linear(4, 2) }, nn.Embedding(5, 3) end; "
          .. l[3], model = "N()", batch = "8",
        data = "data.tensors { inputs = dt.tensor({ 1, 2, 0, 1, 2, 150, 1, 0 }, 'i64'), targets = dt.ones { 8, 2 } }", more = how,
        ranks = 2, alone = not how:find "parallel" })
    end
  end
end
case("an id out of range in evaluation", { says = "one_hot: label 3 is outside 0 to 2", line = "before", batch = "4", model = "N()",
  before = "local N = nn.module 'N'; function N:init() self.l = nn.Linear(3, 2) end; " .. looked_up[1][3], ranks = 2,
  data = "{ train = data.tensors { inputs = dt.zeros({ 8 }, 'i64'), targets = dt.ones { 8, 2 } }, "
    .. "valid = data.tensors { inputs = dt.full({ 3 }, 3, 'i64'), targets = dt.ones { 3, 2 } } }", more = "eval = {}" })
case("labels that only broadcast", { model = "nn.Linear(10, 3)", loss = "function(y, t) return nn.cross_entropy(y, t:squeeze(-1)) end",
  data = "data.tensors { inputs = dt.ones { 8, 10 }, targets = dt.zeros({ 8, 1 }, 'i64'), split = { train = 4, valid = 4 } }", batch = "4",
  more = "eval = { metrics = { 'accuracy' } }", says = "metric accuracy: the output is {4, 3}, so the labels must be {4}, but the targets are {4, 1}" })
-- ranges of hyperparameters
for _, o in ipairs { { "AdamW { lr = 1, betas = { 0.9, 1 } }", "betas wants a number from 0 to less than 1, got 1" },
  { "SGD { lr = math.huge }", "lr wants a finite number of at least 0, got inf" },
  { "Adam { lr = 1, betas = { 1.5, 0.9 } }", "betas wants a number from 0 to less than 1, got 1.5" },
  { "AdamW { lr = 1, eps = -1 }", "eps wants a finite number of at least 0, got %-1" },
  { "SGD { lr = 1, momentum = -2 }", "momentum wants a number from 0 to 1, got %-2" },
  { "RMSprop { lr = 1, alpha = 2 }", "alpha wants a number from 0 to 1, got 2" },
  { "Lion { lr = 1, weight_decay = -1 }", "weight_decay wants a finite number of at least 0, got %-1" },
  { "SGD { lr = 1, groups = { { match = 'weight', momentum = 3 } } }", "groups%[1%]: momentum wants a number from 0 to 1, got 3" } } do
  case("a hyperparameter out of its range: " .. o[1], { optimizer = "optim." .. o[1], line = "optimizer", says = o[2] })
end
case("a group that matches nothing", { optimizer = "optim.SGD { lr = 1, groups = { { match = { 'bias', 'wieght' }, lr = 2 } } }", line = "optimizer",
  says = 'groups%[1%]: the pattern "wieght" matches no parameter; did you mean \'weight\'' })
case("batch norm with one value a channel", { model = "nn.Sequential { nn.BatchNorm2d(3) }", batch = "1", line = "model",
  data = "data.synthetic { inputs = { 3, 1, 1 }, targets = { 3, 1, 1 } }", says = "one value a channel, whose variance is 0.-larger" })

return M
