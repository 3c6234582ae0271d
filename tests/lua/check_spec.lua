-- dtrain check: says equal when runs are equal, and finds faults that are planted.
local support = require "support"

local job = "tests/dist/strategy.lua --threads 1"

local function check(words, options)
  options = options or {}
  options.seconds = 120
  return support.run("check " .. words, options)
end

describe("dtrain check finds equal", function()
  for _, words in ipairs { "--ranks 3 --micro 2", "--ranks 2 --precision bf16", "--ranks 2 --precision f16 --micro 5 --clip 0.1",
    "--ranks 1 --parallel recompute=full", "--ranks 2 --model mlp --parallel recompute.every=2,gradient.bucket_mb=0.1" } do
    it(words, function()
      local code, text = check(job .. " " .. words)
      assert.are.equal(0, code, text)
      assert.is_truthy(text:find "equal: losses to %S+, gradients of %d+ parameters to %S+ %(in later steps %S+%), their values",
        text)
    end)
  end
  it("a job with dropout, ignored labels and a parameter without gradient", function()
    local code, text = check "tests/dist/dropout.lua --ranks 3"
    assert.are.equal(0, code, text)
  end)
  it("300 blocks whose q, k and v are one product, each divided by its own segments", function()
    local code, text = check "tests/dist/fused_blocks.lua --ranks 2 --steps 2"
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find "gradients of 1200 parameters", text)
    local function parameters(words) -- bytes of a rank
      local _, plan = support.run("plan tests/dist/fused_blocks.lua " .. words)
      return tonumber((plan:match "parameters +([%d,]+)":gsub(",", "")))
    end
    assert.is_true(parameters "--ranks 2" < 0.52 * parameters "--parallel none")
  end)
  for _, ranks in ipairs { 2, 4 } do
    it(("batch norm over all replicas, %d of them"):format(ranks), function()
      local code, text = check("tests/dist/sync_norm.lua --ranks " .. ranks)
      assert.are.equal(0, code, text)
    end)
  end
  it("says that batch norm is the reason only where it can be", function()
    local code, text = check "tests/dist/sync_norm.lua --ranks 2 --sync=false"
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find("BatchNorm2d normalises 8 samples together here and 16 in one process", 1, true), text)
    code, text = support.run("check tests/dist/sync_norm.lua --ranks 2", { env = "DT_FAULT=skip_reduce" })
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "DIFFERS" and not text:find "BatchNorm2d", text)
  end)
  it("no replicas whose microbatches differ where the model makes them meet", function()
    local code, text = check "tests/dist/sync_norm.lua --ranks 2 --samples 60"
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "sync_norm.lua:7: the model uses all_reduce over replicas", text)
    assert.is_truthy(text:find "60 samples of data must be multiples of 16", text)
  end)
  it("every strategy that fits", function()
    local code, text = check(job .. " --ranks 2 --all --steps 2")
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find "\ndata +equal", text)
    assert.is_truthy(text:find "recompute=full +equal", text)
    assert.is_truthy(text:find "all %d+ that ran are equal", text)
  end)
end)

describe("dtrain check compares", function()
  for _, parallel in ipairs { "data=2", "tensor=2" } do
    it("a gradient that is zero but for rounding with the whole gradient: " .. parallel, function()
      local code, text = check("tests/dist/keys.lua --ranks 2 --parallel " .. parallel)
      assert.are.equal(0, code, text)
    end)
  end
  it("what later steps are allowed apart from the first", function()
    local code, text = check(job .. " --ranks 2 --parallel tensor=2 --steps 3")
    assert.are.equal(0, code, text)
    local first, later = text:match "parameters to (%S+) %(in later steps (%S+)%)"
    local allowed, allowed_later = text:match "%(allowed (%S+), after the first update (%S+)%)"
    assert.is_true(tonumber(first) <= tonumber(allowed) and tonumber(later) <= tonumber(allowed_later), text)
  end)
  it("with another script", function()
    local dir = support.folder()
    local text_of = [[local dt = require "dtrain"
local nn = dt.nn
return dt.job { model = nn.Sequential { nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4) }, loss = nn.MSE(),
  data = dt.data.synthetic { inputs = { 8 }, targets = { 4 }, samples = 32 }, batch = 8,
  optimizer = dt.optim.SGD { lr = LR }, steps = 3, parallel = { zero = ZERO } }]]
    support.write(dir .. "/a.lua", (text_of:gsub("LR", "0.1"):gsub("ZERO", "1")))
    support.write(dir .. "/b.lua", (text_of:gsub("LR", "0.1"):gsub("ZERO", "0")))
    support.write(dir .. "/c.lua", (text_of:gsub("LR", "0.2"):gsub("ZERO", "0")))
    local code, text = check(("%s/a.lua --ranks 2 --reference %s/b.lua"):format(dir, dir))
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find("against %S+/b.lua on as many"), text)
    code, text = check(("%s/a.lua --ranks 2 --reference %s/c.lua"):format(dir, dir))
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "DIFFERS at step 1: the value of 0.weight differs, most at .- here, %S+ in %S+/c.lua", text)
    code, text = check(("%s/a.lua --ranks 2 --reference %s/none.lua"):format(dir, dir))
    assert.are.equal(2, code, text)
    assert.is_truthy(text:find "none.lua did not run", text)
    code, text = check(("%s/a.lua --ranks 2 --all --reference %s/b.lua"):format(dir, dir))
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "takes %-%-all or %-%-reference, not both", text)
  end)
end)

describe("dtrain check --all", function()
  local function script(parallel)
    local dir = support.folder()
    support.write(dir .. "/x.lua", ([[local dt = require "dtrain"
local nn = dt.nn
local never = { name = "never", place = function(_, _, mesh)
  for _, axis in ipairs(mesh) do if axis.size > 1 then error("never on several ranks", 0) end end
end }
local mine = { name = "mine", options = { { "mine", "count", 1 } }, variants = { { "mine", { 1, 2 } } } }
return dt.job { model = nn.Linear(8, 4), loss = nn.MSE(), batch = 8,
  data = dt.data.synthetic { inputs = { 8 }, targets = { 4 }, samples = 32 },
  optimizer = dt.optim.SGD { lr = 0.1 }, steps = 1, parallel = %s }]]):format(parallel))
    return dir .. "/x.lua"
  end
  it("proves nothing when every row was refused", function()
    local code, text = check(script "{ strategies = { never } }" .. " --ranks 2 --all --steps 1")
    assert.are.equal(2, code, text)
    assert.is_truthy(text:find "nothing is proved: every row was refused", text)
  end)
  it("tries a script's own strategies, too", function()
    local code, text = check(script "{ strategies = { mine } }" .. " --ranks 2 --all --steps 1")
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find "mine=2%S* +equal", text)
  end)
end)

describe("dtrain check finds a planted fault:", function()
  local function differs(what, fault, words, says)
    it(what, function()
      local code, text = check(("%s --ranks 2 --steps 2 %s"):format(job, words), { env = "DT_FAULT=" .. fault })
      assert.are.equal(1, code, text)
      assert.is_truthy(text:find("DIFFERS at step 1: " .. says), text)
    end)
  end
  differs("a reduction of gradients that is left out", "skip_reduce", "",
    "the gradient of %S+ differs, most at %[[%d,]+%]: %S+ on the ranks, %S+ in one process")
  differs("gradients summed where their mean is meant", "no_mean", "", "the gradient of .- 1 of its largest element")
  differs("a microbatch that is lost", "lose_micro", "--micro 4", "the loss is")
  -- Faults of strategies, in a script of the user's or planted.
  local function strange(what, parallel, fault)
    it(what, function()
      local dir = support.folder()
      support.write(dir .. "/x.lua", ([[local dt = require "dtrain"
local nn = dt.nn
local parallel = %s
return dt.job { model = nn.GPT { vocab = 50, layers = 2, heads = 2, width = 16, context = 8 }, loss = nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 50, context = 8, samples = 40 }, batch = { global = 8, micro = 2 },
  optimizer = dt.optim.SGD { lr = 0.1 }, steps = 2, parallel = parallel }]]):format(parallel))
      local code, text = check(dir .. "/x.lua --ranks 2 --steps 1", { env = fault and "DT_FAULT=" .. fault })
      assert.is_true(code == 1 and (text:find "DIFFERS" or text:find "x%.lua:%d+: .*micro" or text:find "still a partial sum")
        ~= nil, text)
    end)
  end
  strange("a gradient hook that forgets to reduce", "{ gradient = { hook = function(bucket) return bucket end } }")
  strange("a gradient hook that forgets to average",
    '{ gradient = { hook = function(bucket) return bucket:all_reduce("data", "sum") * 2 end } }')
  strange("a change of placement without its collective", "{ tensor = 2 }", "skip_place")
  strange("a schedule that loses a microbatch", [[{ pipeline = 2, schedule = function(stage, stages, micro)
  local order = {}
  for i = 1, micro - 1 do order[#order + 1] = { "F", i } end
  for i = 1, micro - 1 do order[#order + 1] = { "B", i } end
  return order
end }]])
  it("under --all, by name", function()
    local code, text = check(job .. " --ranks 2 --all --steps 1", { env = "DT_FAULT=skip_reduce" })
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "\ndata +DIFFERS .- gradient of", text)
  end)
end)

describe("dtrain check says what is wrong with", function()
  it("a PATH without mpirun", function()
    local dir = support.folder()
    os.execute(("ln -s $(command -v sh) %s/sh"):format(dir))
    local code, text = check(job .. " --ranks 2", { env = "PATH=" .. dir })
    if text:find "timeout" then -- it isn't on that PATH either
      code, text = support.sh(("sh -c 'PATH=%s; %s check %s --ranks 2'"):format(dir, support.dtrain, job))
    end
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "needs Open MPI's mpirun on the PATH to start 2 ranks", text)
  end)
  it("being started by mpirun", function()
    local code, text = check(job, { ranks = 2 })
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find "run it without mpirun: dtrain check tests/dist/strategy.lua %-%-ranks 2", text)
  end)
  it("a strategy that is refused", function()
    local code, text = check(job .. " --ranks 2 --parallel data=3")
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "strategy.lua:%d+: .-data = 3, .-but 2 ranks run", text)
  end)
  it("an override that is none", function()
    local code, text = check(job .. " --ranks 2 --parallel fast")
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "%-%-parallel wants key=value,key=value, got 'fast'", text)
    code, text = support.run("plan " .. job .. " --parallel recmpute=full")
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "no option 'recmpute'; did you mean 'recompute'", text)
  end)
  it("a script that returns no job", function()
    local dir = support.folder()
    support.write(dir .. "/x.lua", "return 3")
    local code, text = check(dir .. "/x.lua --ranks 2")
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "dtrain check needs a script that returns dt.job", text)
  end)
  it("a side that does not run", function()
    local dir = support.folder()
    support.write(dir .. "/x.lua", [[local dt = require "dtrain"
return dt.job { model = dt.nn.Embedding(4, 3), loss = dt.nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 9, context = 4, samples = 8 },
  batch = 4, optimizer = dt.optim.SGD { lr = 0.1 }, steps = 1 }]])
    local code, text = check(dir .. "/x.lua --ranks 2")
    assert.are.equal(2, code, text)
    assert.is_truthy(text:find "the one process did not run", text)
    assert.is_truthy(text:find "is outside 0 to", text)
  end)
  it("a TMPDIR that is not there", function()
    local code, text = check(job .. " --ranks 2", { env = "TMPDIR=/nowhere/at/all" })
    assert.are.equal(1, code, text)
    assert.is_truthy(text:find "check needs a folder for its files, and none can be made in TMPDIR=/nowhere/at/all; set TMPDIR", text)
  end)
  it("ranks that write elsewhere", function()
    local dir = support.folder()
    support.write(dir .. "/launcher", "#!/bin/sh\nexit 0\n")
    os.execute("chmod +x " .. dir .. "/launcher")
    local code, text = check(job .. " --ranks 2 --launch " .. dir .. "/launcher")
    assert.are.equal(2, code, text)
    assert.is_truthy(text:find "its rank 0 did not write .- here; start rank 0 on this host", text)
  end)
end)

describe("dtrain check --launch", function()
  it("starts the ranks by these words", function()
    local code, text = check(job .. (" --ranks 2 --launch 'sh %s/tests/tools/ranks'"):format(support.root))
    assert.are.equal(2, code, text) -- which takes no -n
    local dir = support.folder()
    support.write(dir .. "/launcher", ('#!/bin/sh\n[ "$1" = -n ] && shift\nexec sh %s/tests/tools/ranks "$@"\n'):format(support.root))
    os.execute("chmod +x " .. dir .. "/launcher")
    code, text = check(job .. " --ranks 2 --launch " .. dir .. "/launcher")
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find "equal: losses", text)
  end)
end)

describe("dtrain check that is ended", function()
  local body = [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local pids = assert(io.open(%q, "a"))
pids:write(io.open "/proc/self/stat":read "n", "\n")
pids:close()
local rows = function() require "dtrain.core".sleep(0.02) return dt.ones { 10 }, dt.ones { 5 } end
return dt.job { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 8, optimizer = optim.SGD { lr = 0.1 },
  data = data.from(rows, 40) }]]
  -- Ends it once so many processes have come to the script; returns its exit code, what it said, what lives on, and its
  -- temporary files.
  local function ended(signal, processes)
    local dir = support.folder()
    support.write(dir .. "/a.lua", body:format(dir .. "/pids"))
    local line = ([[mkdir tmp; TMPDIR=$PWD/tmp %s check a.lua --ranks 2 --steps 10 > log 2>&1 & pid=$!
      for i in $(seq 200); do [ -e pids ] && [ $(wc -l < pids) -ge %d ] && break; sleep 0.05; done
      sleep 0.3; kill -%s $pid; wait $pid; echo code $?; cat log
      for p in $(cat pids); do grep -qs "^State:.[^Z]" /proc/$p/status && echo alive $p; done; ls tmp]]):format(
      support.quote(support.dtrain), processes, signal)
    local _, text, seconds = support.sh("sh -c " .. support.quote(line), { dir = dir, seconds = 40 })
    assert.is_true(seconds < 20, text)
    return text
  end
  for _, c in ipairs { { "TERM", 2, 143 }, { "INT", 4, 130 }, { "HUP", 4, 129 }, { "TERM", 4, 143 } } do
    it(("by SIG%s takes its %s along, and leaves no file"):format(c[1], c[2] == 2 and "one process" or "ranks"), function()
      local text = ended(c[1], c[2]) -- the shell may say Hangup first
      assert.matches("^%a*\n?code " .. c[3] .. "\ndtrain: ended by SIG" .. c[1]
        .. " before training; nothing is left half%-written\n$", text)
    end)
  end
end)
