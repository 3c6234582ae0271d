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
      assert.is_truthy(text:find "equal: losses to %S+, gradients of %d+ parameters to %S+, their values to %S+", text)
    end)
  end
  it("a job with dropout, ignored labels and a parameter without gradient", function()
    local code, text = check "tests/dist/dropout.lua --ranks 3"
    assert.are.equal(0, code, text)
  end)
  it("every strategy that fits", function()
    local code, text = check(job .. " --ranks 2 --all --steps 2")
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find "\ndata +equal", text)
    assert.is_truthy(text:find "recompute=full +equal", text)
    assert.is_truthy(text:find "all that ran are equal", text)
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
  -- Faults of strategies, in a script of the user's or planted; skipped while the strategy is not there.
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
      local option = text:match "has no option '([^']*)'"
      if option then return pending(("parallel has no option '%s' yet"):format(option)) end
      assert.is_true(code == 1 and (text:find "DIFFERS" or text:find "x%.lua:%d+: .*micro") ~= nil, text)
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
end)
