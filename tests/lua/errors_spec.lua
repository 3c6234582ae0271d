-- luacheck: no max line length
-- Mistakes that a user makes: each gives `file:line: what; what to do` (or `dtrain: ...` for the command line), a
-- code other than 0, and no half-written file. A case is { what, script, pattern of the message [, options] }; the
-- script runs through the program, the marked line (`--!`) is the one that the message must name.
local program = (os.getenv "DT_BUILD" or "build") .. "/dtrain"
local folder = os.tmpname()
os.remove(folder)
os.execute("mkdir -p " .. folder)

local function write(name, text)
  local path = folder .. "/" .. name
  local f <close> = assert(io.open(path, "wb"))
  f:write(text)
  return path
end

write("short.txt", "too short")
write("text.txt", ("some text to learn from. "):rep(40))
write("cut.idx", string.pack(">I4I4I4I4", 0x803, 100, 28, 28) .. ("x"):rep(500))
write("bad.idx", "this is no IDX file at all")
write("images.idx", string.pack(">I4I4I4I4", 0x803, 3, 2, 2) .. ("x"):rep(12))
write("labels.idx", string.pack(">I4I4", 0x801, 2) .. "\0\1")
write("bad.csv", "a,b,y\n1,2,3\n4,oops,6\n")
write("bad.safetensors", "\255\255\255\255\255\255\255\255 no header")
write("bad.npy", "no numpy")

local head = [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local function job(t)
  local all = { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 8, optimizer = optim.SGD { lr = 0.1 }, steps = 3,
    data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 64 } }
  for _, k in ipairs { "model", "loss", "batch", "optimizer", "steps", "data", "eval", "clip", "precision", "parallel",
    "schedule", "checkpoint", "device" } do
    if t[k] ~= nil then all[k] = t[k] end
  end
  return dt.job(all)
end
]]

local cases = {
  -- names
  { "unknown key of a job", 'return dt.job { model = nn.Linear(1, 1), optimiser = 1 } --!',
    "did you mean 'optimizer'" },
  { "unknown option of a layer", 'nn.Linear(2, 2, { bais = false }) --!', "did you mean 'bias'" },
  { "unknown layer", 'nn.Liner(2, 2) --!', "did you mean 'nn.Linear'" },
  { "unknown operation", 'dt.relo(dt.ones { 2 }) --!', "did you mean 'dt.relu'" },
  { "unknown optimizer", 'optim.AdmaW { lr = 1 } --!', "did you mean 'optim.AdamW'" },
  { "unknown option of an optimizer", 'optim.SGD { lr = 1, momentun = 0.9 } --!', "did you mean 'momentum'" },
  { "unknown option of a schedule", 'optim.cosine { totl = 3 } --!', "did you mean 'total'" },
  { "unknown data kind", 'data.txt { file = "x" } --!', "data%.txt does not exist; did you mean" },
  { "unknown option of GPT", 'nn.GPT { vocab = 8, layers = 1, heads = 1, widht = 8, context = 4 } --!',
    "did you mean 'width'" },
  { "unknown attribute of an operation", 'dt.softmax(dt.ones { 2 }, { dmi = 0 }) --!', "did you mean 'dim'" },
  { "unknown dtype", 'dt.ones({ 2 }, "f23") --!', "unknown dtype 'f23'" },
  { "unknown metric", 'job { eval = { data = data.synthetic { inputs = { 10 }, targets = { 5 } }, metrics = { "acuracy" } } } --!',
    "did you mean 'accuracy'" },
  { "unknown precision", 'job { precision = "fp16" } --!', "did you mean 'f16'" },
  { "unknown form of positions", 'nn.GPT { vocab = 8, layers = 1, heads = 1, width = 8, context = 4, positions = "rotery" } --!',
    "did you mean 'rotary'" },
  -- types and values
  { "a width that heads do not divide", 'nn.GPT { vocab = 8, layers = 1, heads = 12, width = 770, context = 4 } --!',
    "width 770 does not divide by heads 12; 768 or 780 would" },
  { "key heads that do not divide", 'nn.Attention { width = 8, heads = 4, kv_heads = 3 } --!',
    "does not divide by kv_heads" },
  { "an odd head for rotary", 'nn.Attention { width = 9, heads = 3, rotary = true } --!', "even head size" },
  { "a missing layer argument", 'nn.Linear(10) --!', "outputs wants a whole number" },
  { "a fractional width", 'nn.Linear(10, 2.5) --!', "whole number of at least 1" },
  { "a negative width", 'nn.Linear(10, -1) --!', "at least 1" },
  { "a probability above 1", 'nn.Dropout(1.5) --!', "from 0 to 1" },
  { "groups that do not divide channels", 'nn.Conv2d(3, 8, 3, { groups = 2 }) --!', "divide by groups" },
  { "a list with a gap in Sequential", 'nn.Sequential { nn.Linear(1, 1), nil, nn.Linear(1, 1) } --!', "without gaps" },
  { "a class in Sequential", 'nn.Sequential { nn.ReLU } --!', "make an instance" },
  { "a class as model", 'return job { model = nn.ReLU } --!', "make an instance" },
  { "an optimizer's function as optimizer", 'job { optimizer = optim.SGD } --!', "optimizer wants" },
  { "a string as learning rate", 'optim.SGD { lr = "fast" } --!', "lr wants a finite number" },
  { "a negative learning rate", 'optim.SGD { lr = -1 } --!', "at least 0" },
  { "one beta", 'optim.Adam { lr = 1, betas = { 0.9 } } --!', "wants 2 numbers" },
  { "a bad pattern of a group", 'optim.SGD { lr = 1, groups = { { match = "%" } } } --!', "no Lua pattern" },
  { "a group without match", 'optim.SGD { lr = 1, groups = { { lr = 2 } } } --!', "needs match" },
  { "steps and epochs", 'return dt.job { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 8, steps = 1, epochs = 1, '
    .. 'optimizer = optim.SGD {}, data = data.synthetic { inputs = { 10 }, targets = { 5 } } } --!',
      "both steps and epochs" },
  { "neither steps nor epochs", 'return dt.job { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 8, '
    .. 'optimizer = optim.SGD {}, data = data.synthetic { inputs = { 10 }, targets = { 5 } } } --!',
      "needs steps or epochs" },
  { "a missing model", 'dt.job { loss = nn.MSE() } --!', "needs 'model'" },
  { "micro above global", 'job { batch = { global = 4, micro = 8 } } --!', "micro 8 is more than global 4" },
  { "a batch of 0", 'job { batch = 0 } --!', "at least 1" },
  { "a clip of 0", 'job { clip = 0 } --!', "clip wants a finite number above 0" },
  { "more ranks asked than run", 'return job { parallel = { data = 4 } } --!', "data = 4, but 1 rank run" },
  { "evaluation without data", 'job { eval = { every = 1 } } --!', "eval needs data" },
  { "warm-up beyond the end", 'optim.warmup_cosine { warmup = 10, total = 5 } --!', "must be more than warmup" },
  { "a schedule that is none", 'job { schedule = 3 } --!', "schedule wants a schedule" },
  { "a schedule that returns no number", 'return job { schedule = function() end } --!', "must return a number" },
  { "Nesterov without momentum", 'optim.SGD { lr = 1, nesterov = true } --!', "nesterov needs momentum" },
  -- shapes and tracing
  { "a matrix product that does not fit", 'dt.matmul(dt.ones { 2, 3 }, dt.ones { 4, 5 }) --!', "matmul" },
  { "shapes that do not broadcast", 'local x = dt.ones { 2, 3 } + dt.ones { 4 } --!', "broadcast" },
  { "a reshape of another size", 'dt.ones { 6 }:reshape { 4, 2 } --!', "reshape" },
  { "a dim outside", 'dt.ones { 2, 3 }:sum(2) --!', "dim 2" },
  { "a string where a tensor belongs", 'dt.relu("x") --!', "must be a tensor" },
  { "a ragged table", 'dt.tensor { { 1, 2 }, { 3 } } --!', "" },
  { "item of many elements", 'dt.ones { 2 }:item() --!', "item" },
  { "an index outside", 'local x = dt.ones { 2 }[3] --!', "outside 1 to 2" },
  { "a model that does not fit the data", 'return job { model = nn.Linear(9, 5) } --!', "linear" },
  { "targets of another shape", 'return job { model = nn.Linear(10, 4) }', "shapes must be equal" },
  { "comparing a symbolic tensor", 'return job { model = function(x)\n  if x:sum() > 0 then return x end --!\nend }',
    "dt%.where" },
  { "a forward that returns nothing", 'return job { model = function() end } --!', "returned nothing" },
  { "a loss that is no scalar", 'return job { loss = function(y) return y end } --!', "must be a scalar" },
  { "a loss that is a number", 'return job { loss = function() return 1 end } --!', "must be a tensor" },
  { "a class without forward", 'local E = nn.module "E"\nreturn job { model = E() } --!', "E has no forward" },
  { "an update that returns nothing", 'return job { optimizer = optim.define { update = function() end } { lr = 1 } } --!',
    "must return the new parameter" },
  { "a hyperparameter that nobody gave",
    'return job { optimizer = optim.define { update = function(p, g, s, h) return p - g * h.rate end } { lr = 1 } } --!', "h%.rate" },
  { "a parameter outside the model", 'local stray = nn.Linear(10, 5)\nreturn job { model = function(x)\n  local y = stray(x) --!\n'
    .. '  return y\nend }', "is no part of" },
  { "a Lua error in forward", 'return job { model = function(x)\n  return x.y.z --!\nend }', "no method 'y'" },
  { "a Lua error in the script", 'local t = nil\nprint(t.x) --!', "index a nil value" },
  -- data
  { "a missing file", 'data.text { file = "nowhere.txt", context = 4 } --!', "nowhere%.txt" },
  { "a text shorter than the context", 'data.text { file = DIR .. "/short.txt", context = 64 } --!', "context" },
  { "a text without context", 'data.text { file = DIR .. "/text.txt" } --!', "needs 'context'" },
  { "a truncated IDX file", 'data.idx { images = DIR .. "/cut.idx" } --!', "cut%.idx" },
  { "a file that is no IDX", 'data.idx { images = DIR .. "/bad.idx" } --!', "bad%.idx" },
  { "labels of another number", 'data.idx { images = DIR .. "/images.idx", labels = DIR .. "/labels.idx" } --!', "2" },
  { "a CSV with a word", 'data.csv { file = DIR .. "/bad.csv", targets = "y" } --!', "oops" },
  { "a CSV without that column", 'data.csv { file = DIR .. "/bad.csv", targets = "z" } --!', "z" },
  { "a damaged safetensors file", 'dt.load(DIR .. "/bad.safetensors") --!', "bad%.safetensors" },
  { "a damaged .npy file", 'dt.load(DIR .. "/bad.npy") --!', "bad%.npy" },
  { "a file of unknown kind", 'dt.load(DIR .. "/text.txt") --!', "safetensors" },
  { "a split above the whole", 'data.synthetic { inputs = { 2 }, classes = 2, split = { train = 0.9, valid = 0.3 } } --!', "at most 1" },
  { "an empty split", 'data.synthetic { inputs = { 2 }, classes = 2, samples = 4, split = { train = 0.99, valid = 0.01 } } --!', "empty" },
  { "tensors of unequal length", 'data.tensors { inputs = dt.ones { 4, 2 }, targets = dt.ones { 5 } } --!', "5" },
  { "an order outside the rows", 'data.tensors { inputs = dt.ones { 4, 2 }, order = { 0, 9 } } --!', "9" },
  { "a label outside the classes", 'return dt.job { model = nn.Linear(2, 3), loss = nn.CrossEntropy(), batch = 2, steps = 1, '
    .. 'optimizer = optim.SGD {}, data = data.tensors { inputs = dt.ones { 2, 2 }, targets = dt.tensor({ 0, 7 }, "i64") } } --!', "cross_entropy" },
  { "a non-finite loss", 'return job { optimizer = optim.SGD { lr = 1e30 }, steps = 50 }', "step %d+: the loss is inf" },
  -- checkpoints and the command line
  { "resume without a folder", 'return job {} --!', "no checkpoint folder", "--resume auto" },
  { "resume from nowhere", 'return job {}', "nowhere", "--resume " .. folder .. "/nowhere" },
  { "an unknown option", 'return job {}', "did you mean %-%-steps", "--stepz 3" },
  { "an option without value", 'return job {}', "%-%-steps needs a value", "--steps" },
  { "a word as a number", 'return job {}', "whole number", "--steps many" },
  { "a stray word", 'return job {}', "unexpected 'more'", "more" },
  { "CUDA without a GPU", 'return job {} --!', 'device = "cuda": ', "--device cuda" },
  { "a device that no build has", 'return job { device = "tpu" } --!', 'device is "cpu", "cuda" or "auto", got \'tpu\'' },
  { "a script that returns something else", 'return 3', "return dt.job" },
  { "a script that does not parse", 'local x = = 3 --!', "unexpected symbol" },
  { "an unknown argument of the script", 'local a = dt.args { layers = 6 }\nprint(a.layer) --!',
    "did you mean 'layers'" },
  { "an output folder that is a file", 'return job {}', "short%.txt", "--out " .. folder .. "/short.txt" },
}

local function run(command)
  local p = io.popen("timeout 20 " .. command .. " 2>&1")
  local text = p:read("a")
  local _, how, code = p:close()
  return text, how == "exit" and code or 128 + code
end

local function marked(source)
  local n = 0
  for line in (source .. "\n"):gmatch("(.-)\n") do
    n = n + 1
    if line:find("--!", 1, true) then return n end
  end
end

describe("mistakes", function()
  teardown(function() os.execute("rm -rf " .. folder) end)

  for i, case in ipairs(cases) do
    it(case[1] .. " is told at its line", function()
      local source = head .. ("local DIR = %q\n"):format(folder) .. case[2]
      local path = write(("case%d.lua"):format(i), source)
      local text, code = run(program .. " " .. path .. " " .. (case[4] or ""))
      assert.is_true(code ~= 0 and code < 124, ("exit code %d, printed: %s"):format(code, text))
      assert.matches(case[3], text)
      local line = marked(source)
      if line then
        local found = text:match("([^\n]*" .. ("case%d.lua:%d: "):format(i, line):gsub("%p", "%%%0") .. "[^\n]*)")
        assert.is_truthy(found, ("wanted case%d.lua:%d:, got: %s"):format(i, line, text))
      end
      assert.is_nil(text:find("stack traceback", 1, true))
      assert.is_nil(text:find("stdlib/", 1, true), text)
    end)
  end

  it("names the line of a script whose path is longer than a message has room for", function()
    local dir = folder .. ("/" .. ("d"):rep(150)):rep(3)
    os.execute("mkdir -p " .. dir)
    local path = dir:sub(#folder + 2) .. "/script.lua"
    for _, body in ipairs { "return job { model = nn.Linear(7, 5) }", -- an operation's error
      "return job { model = nn.Sequential { nn.Linear(10, 15), nn.GELU(), nn.Linear(15, 5) }, parallel = { tensor = 2 } }" } do -- a pass's
      local text, code = run(("%s plan %s --ranks 2"):format(program, write(path, head .. "\n\n" .. body)))
      assert.are_not.equal(0, code)
      local _, lines = (head .. "\n\n"):gsub("\n", "")
      assert.matches(("ddd/script%%.lua:%d: "):format(lines + 1), text)
    end
  end)

  it("names the verb nearest to an unknown one", function()
    local text, code = run(program .. " trian")
    assert.are_not.equal(0, code)
    assert.matches("did you mean", text)
  end)

  it("says that a script is missing", function()
    local text, code = run(program .. " nowhere.lua")
    assert.are_not.equal(0, code)
    assert.matches("cannot open the script nowhere%.lua", text)
  end)

  if os.execute("command -v mpirun > /dev/null 2>&1") then
    local function ranks(n, body)
      local path = write("ranks.lua", head .. body)
      local began = os.time()
      local text, code = run(("mpirun --oversubscribe -n %d %s %s"):format(n, program, path))
      return text, code, os.time() - began
    end
    it("ends all ranks when one raises an error", function()
      local text, code, seconds = ranks(2, 'if dt.rank() == 1 then error("broken on purpose") end\nreturn job {}')
      assert.are_not.equal(0, code)
      assert.matches("broken on purpose", text)
      assert.is_true(seconds <= 5, seconds .. " s")
    end)
    it("refuses more ranks than samples", function()
      local text, code = ranks(3, 'return job { data = data.tensors { inputs = dt.ones { 2, 10 }, targets = dt.ones { 2, 5 } } }')
      assert.are_not.equal(0, code)
      assert.matches("3 ranks share 2 samples", text)
    end)
    it("tells apart ranks that do different things", function()
      local text, code, seconds = ranks(2, 'return job { model = nn.Linear(10, 5, { bias = dt.rank() == 0 }) }')
      assert.are_not.equal(0, code)
      assert.matches("rank", text)
      assert.is_true(seconds <= 10, seconds .. " s")
    end)
  end
end)
