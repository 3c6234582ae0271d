-- Strategies of the gradient side equal one process: a strategy is tested by standing in the list. After 5 steps of a small language
-- model (tests/dist/zero.lua; 33 samples in batches of 10, so that the last step has 3) the losses, every parameter, every optimizer
-- state and the evaluation are compared.
local dt = require "dtrain"
local support = require "support"

local dir = support.folder()
local script = "tests/dist/zero.lua --quiet --evals "

local wanted = {}
local function train(words, ranks)
  local save = ("%s/%s.safetensors"):format(dir, ranks and "got" or "want" .. #words)
  local code, text = support.run(("%s %s --report %s"):format(script, words, save), { ranks = ranks, seconds = 60 })
  assert(code == 0, text)
  return dt.load(save)
end
local function one_process(words)
  wanted[words] = wanted[words] or train(words .. " --micro 10")
  return wanted[words]
end

local function differences(got, want, tolerance)
  local out = {}
  for name, w in dt.sorted(want) do
    local d = got[name] and support.distance(got[name], w)
    -- the gradient of a key's bias is zero but for rounding
    if not name:find "qkv%.bias" and not (d and d <= tolerance) then out[#out + 1] = ("%s: %s"):format(name, d) end
  end
  return table.concat(out, "\n")
end

-- what the job is; what runs it in parts; the tolerance
local jobs = {
  { "--clip 0.5", 2e-5 }, { "--optimizer lamb", 2e-5 }, { "--optimizer sgd --clip_value 0.001", 2e-5 },
  { "--precision bf16 --clip 0.5", 2e-2 }, { "--precision f16", 1e-2 },
}
local strategies = {
  "--zero 0", "--zero 1", "--zero 2", "--zero 3", "--zero 3 --resident 300", "--zero 0 --every micro",
  "--zero 1 --order registration", "--zero 2 --bucket 25", "--zero 1 --dtype f32",
}
for _, job in ipairs(jobs) do
  describe("a scalar parameter", function()
  for zero = 0, 3 do
    it(("equals one process with zero = %d"):format(zero), function()
      local here = support.folder()
      support.write(here .. "/x.lua", [[local dt = require "dtrain"
local nn = dt.nn
local Net = nn.module "Net"
function Net:init() self.scale, self.out = nn.parameter({}, nn.init.constant(0.5)), nn.Linear(8, 4) end
function Net:forward(x) return self.out(x) * self.scale end
return dt.job { model = Net(), loss = nn.MSE(), data = dt.data.synthetic { inputs = { 8 }, targets = { 4 }, samples = 32 }, batch = 8,
  optimizer = dt.optim.AdamW { lr = 0.01 }, steps = 3, parallel = {} }]])
      local code, text = support.run(("check %s/x.lua --ranks 2 --parallel zero=%d"):format(here, zero), { seconds = 120 })
      assert.are.equal(0, code, text)
    end)
  end
end)

describe(job[1], function()
    for i, strategy in ipairs(strategies) do
      for ranks = 1, 4 do
        -- every strategy with the first job, in one or three microbatches; of the rest a part that meets each strategy
        if job == jobs[1] and (ranks > 1 or i == 4) or (i + ranks) % 4 == #job[1] % 4 then
          local accumulation = (i + ranks) % 2 == 0 and 1 or 3
          it(("%s on %d ranks, accumulation %d"):format(strategy, ranks, accumulation), function()
            local rows = math.ceil(10 / ranks / accumulation)
            local got = train(("%s %s --micro %d"):format(job[1], strategy, rows), ranks)
            assert.are.equal("", differences(got, one_process(job[1]), job[2]))
          end)
        end
      end
    end
  end)
end

describe("fewer samples than ranks", function()
  for zero = 0, 3 do
    it("under zero " .. zero, function()
      local words = "--global 3 --clip 0.5"
      wanted[words] = wanted[words] or train(words .. " --micro 3")
      local got = train(words .. " --micro 1 --zero " .. zero, 4)
      assert.are.equal("", differences(got, wanted[words], 2e-5))
    end)
  end
end)

describe("memory", function()
  local function planned(words, ranks)
    local code, text = support.run(("plan tests/dist/zero.lua --ranks %d %s"):format(ranks, words))
    assert(code == 0, text)
    local out = {}
    for name, numbers in text:gmatch "\n([%a ]-)   +(%d[%d,]*)" do
      out[name:gsub(" +$", "")] = tonumber((numbers:gsub(",", "")))
    end
    return out
  end
  for _, ranks in ipairs { 2, 3, 4, 64 } do
    it(("of states is one part in %d, to the byte"):format(ranks), function()
      local size = "--global 64 --samples 64 "
      local plain, one = planned(size, ranks), planned(size .. "--zero 1", ranks)
      local two, three = planned(size .. "--zero 2", ranks), planned(size .. "--zero 3", ranks)
      assert.are.equal(plain["optimizer states"], one["optimizer states"] * ranks)
      assert.are.equal(one["optimizer states"], two["optimizer states"])
      assert.are.equal(one["optimizer states"], three["optimizer states"])
      local totals = 64 -- the step's loss and count lie beside the gradients, on every rank
      assert.are.equal(plain.gradients - totals, (two.gradients - totals) * ranks)
      assert.are.equal(plain.gradients - totals, (three.gradients - totals) * ranks)
      assert.are.equal(plain.parameters, one.parameters)
      assert.are.equal(plain.parameters, three.parameters * ranks)
      local low, step = planned(size .. "--precision bf16", ranks), planned(size .. "--precision bf16 --zero 1", ranks)
      assert.are.equal(low["optimizer states"], step["optimizer states"] * ranks)
      assert.is_true(step.parameters < low.parameters)
    end)
  end
end)

describe("a resumed run under ZeRO", function()
  for zero = 1, 3 do
    it("continues with the same bits, zero " .. zero, function()
      local whole, cut = support.folder(), support.folder()
      local line = ("%s --zero %d --precision f16 --clip 0.5 --steps 5 --dir "):format(script, zero)
      local code, text = support.run(line .. whole, { ranks = 3 })
      assert(code == 0, text)
      code, text = support.run((line .. cut):gsub("%-%-steps 5", "--steps 3"), { ranks = 3 })
      assert(code == 0, text)
      code, text = support.run(line .. cut .. " --resume auto", { ranks = 3 })
      assert(code == 0, text)
      for _, file in ipairs { "model", "optim" } do
        local name = ("/step-00000005/%s.safetensors"):format(file)
        assert.is_true(support.read(whole .. name) == support.read(cut .. name))
      end
    end)
  end
  it("on another number of ranks, from plain data parallelism", function()
    local whole, other = support.folder(), support.folder()
    local code, text = support.run(script .. "--steps 3 --dir " .. whole, { ranks = 2 })
    assert(code == 0, text)
    code, text = support.run(("%s --steps 5 --zero 3 --dir %s --resume %s/step-00000003"):format(script, other, whole),
      { ranks = 4 })
    assert(code == 0, text)
    code, text = support.run(script .. "--steps 5 --resume auto --dir " .. whole)
    assert(code == 0, text)
    local function load(d) return dt.load(d .. "/step-00000005/model.safetensors") end
    assert.are.equal("", differences(load(other), load(whole), 2e-5))
  end)
end)

describe("what cannot be", function()
  local function message(words, want)
    local code, text = support.run("plan tests/dist/zero.lua --ranks 2 " .. words)
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find(want, 1, true), text)
  end
  it("says so", function()
    message("--zero 4", "zero is 0 (off), 1, 2 or 3, got 4")
    message("--zero 3 --resident -5", "resident is a number of elements")
    message("--zero 1 --optimizer factored", "set zero = 0, or keep to elementwise operations")
    message("--every week", "every = \"week\" is unknown")
  end)
end)

describe("resident memory", function()
  local function figures(words)
    local code, text = support.run("tests/bench/work.lua --work mlp4 --ranks 2 --count 1 " .. words, { ranks = 2, seconds = 60 })
    assert(code == 0, text)
    local peak, plan = text:match "peak_mb=([%d.]+) plan_mb=([%d.]+)"
    return tonumber(peak), tonumber(plan)
  end
  it("is below plain data parallelism's by what shares save", function()
    local peak, plan = figures ""
    for zero = 1, 3 do
      local p, q = figures("--parallel zero=" .. zero)
      assert.is_true(plan - q > 8 and peak - p > plan - q,
        ("zero %d: %g MB less are planned, %g resident"):format(zero, plan - q, peak - p))
    end
  end)
end)
