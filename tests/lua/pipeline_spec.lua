-- luacheck: no max line length
-- Pipelines: the library's schedules against their closed forms; training under every schedule against one process;
-- checkpoints; the chart; mistakes and their messages.
local dt = require "dtrain"
local stages = require "dtrain.strategy.stages"
local support = require "support"

local function checked(name, ranks, micro, chunks) return stages.new(name, chunks):steps(ranks, micro) end

describe("the schedule", function()
  local sizes = { { 1, 1 }, { 2, 1 }, { 2, 4 }, { 3, 2 }, { 4, 4 }, { 4, 8 }, { 5, 13 }, { 8, 16 } }
  it("gpipe holds every microbatch and idles (p - 1) forwards and backwards", function()
    for _, c in ipairs(sizes) do
      local p, m = c[1], c[2]
      local s = checked("gpipe", p, m)
      assert.are.equal((m + p - 1) * 6, (s:time(1, 2, 3)))
      for _, n in ipairs(s:in_flight()) do assert.are.equal(m, n) end
    end
  end)
  it("1f1b takes 2 (m + p - 1) ticks and holds at most p - s", function()
    for _, c in ipairs(sizes) do
      local p, m = c[1], c[2]
      local s = checked("1f1b", p, m)
      assert.are.equal(2 * (m + p - 1), (s:time(1, 1, 0)))
      for i, n in ipairs(s:in_flight()) do assert.are.equal(math.min(p - i + 1, m), n) end
      for rank, actions in ipairs(s:starts(1, 1, 0)) do -- F(j) begins at tick 2 j + s once the pipeline is full, B(j) at 2 j + 2 p - 1 - s
        for _, a in ipairs(actions) do
          if a[1] == "B" then assert.are.equal(2 * (a[2] - 1) + 2 * p - 1 - (rank - 1), a[4]) end
        end
      end
    end
  end)
  it("interleaved divides the bubble by the chunks and holds 2 (p - r - 1) + (v - 1) p + 1", function()
    for _, c in ipairs { { 2, 4, 2 }, { 2, 8, 3 }, { 4, 8, 2 }, { 4, 12, 3 }, { 3, 9, 2 } } do
      local p, m, v = table.unpack(c)
      local s = checked("interleaved", p, m, v)
      assert.are.equal(m * v * 3 + (p - 1) * 3, (s:time(1, 1, 1)))
      for i, n in ipairs(s:in_flight()) do
        assert.are.equal(math.min(2 * (p - i) + (v - 1) * p + 1, m * v), n)
      end
    end
  end)
  it("zb_h1 idles (p - 1) (F + B - W) and holds p", function()
    for _, c in ipairs { { 2, 4 }, { 3, 6 }, { 4, 8 }, { 8, 16 } } do
      local p, m = c[1], c[2]
      local s = checked("zb_h1", p, m)
      assert.is_true(s:split())
      assert.are.equal(3 * m + p - 1, (s:time(1, 1, 1)))
      for _, n in ipairs(s:in_flight()) do assert.are.equal(p, n) end
    end
  end)
end)

local dir = support.folder()
local script = "tests/dist/pipelines.lua"

-- Every line of the run names a case; all must be within the tolerance.
local function compare(words, ranks, tolerance, cases)
  local code, text = support.run(("%s --want %s/want %s"):format(script, dir, words), { ranks = ranks, seconds = 200 })
  assert.are.equal(0, code, text)
  local n = 0
  for what, d in text:gmatch "([^\n]-): (%S+) [^\n]*\n" do
    n = n + 1
    assert.is_true(tonumber(d) <= tolerance, what .. " differs by " .. d)
  end
  assert.are.equal(cases, n, text)
end

local function reference(words)
  local code, text = support.run(("%s --save %s/want %s"):format(script, dir, words or ""))
  assert.are.equal(0, code, text)
end

describe("training on a pipeline equals one process", function()
  setup(function() reference() end)
  it("on 2 ranks: gpipe, 1f1b, interleaved, zb_h1 and a schedule of the script's own", function() compare("--pipeline 2 --models tied,untied,skip", 2, 2e-5, 60) end)
  it("on 4 ranks", function() compare("--pipeline 4 --micros 1,4,8 --models tied,skip", 4, 2e-5, 30) end)
  it("on 2 pipelines of 2 ranks", function()
    compare("--pipeline 2 --micros 3,8 --schedules 1f1b,zb_h1 --models tied,skip", 4, 2e-5, 8)
  end)
  it("with a layer that several stages and several chunks share", function()
    compare("--pipeline 2 --micros 8 --schedules interleaved,zb_h1 --models shared", 4, 2e-5, 2)
  end)
  it("with stages in a V, and with copies of them for microbatches from both ends", function()
    compare("--pipeline 2 --micros 1,3,8 --schedules v,both --models tied,skip,shared", 2, 2e-5, 18)
    compare("--pipeline 4 --micros 8 --schedules v,both --models tied,skip,shared", 4, 2e-5, 6)
  end)
  for zero = 1, 3 do
    it(("with zero = %d, whichever parts of the schedule make a parameter's gradient"):format(zero), function()
      compare(("--zero %d --pipeline 2 --micros 3,8 --schedules zb_h1,v,both --models tied,shared"):format(zero), 4, 2e-5, 12)
    end)
  end
  it("with blocks made again in backward, in the midst of which stages begin", function()
    reference "--models few"
    compare("--recompute full --models few --pipeline 2 --micros 2,8 --schedules 1f1b,interleaved,zb_h1,v,both", 2, 2e-5, 10)
    compare("--recompute full --models few --pipeline 4 --micros 4 --schedules interleaved,both --zero 1", 4, 2e-5, 2)
  end)
  it("with clipping, on 2 pipelines of 2", function()
    reference "--clip 0.1 --models tied"
    compare("--clip 0.1 --models tied --pipeline 2 --micros 4 --schedules 1f1b,both", 4, 2e-5, 2)
  end)
  for _, precision in ipairs { "bf16", "f16" } do
    it("in " .. precision, function()
      reference("--models tied --steps 3 --precision " .. precision)
      compare(("--models tied --steps 3 --precision %s --pipeline 2 --micros 1 --schedules 1f1b,zb_h1"):format(precision), 2, 2e-2, 2)
    end)
  end
end)

local head = [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local args = dt.args { dir = "", resumed = 0 }
local function job(parallel, micro)
  return dt.job { model = nn.Sequential { nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4) }, loss = nn.MSE(),
    data = data.synthetic { inputs = { 8 }, targets = { 4 }, samples = 48 }, batch = { global = 16, micro = micro or 2 }, steps = 8,
    optimizer = optim.AdamW { lr = 1e-2 }, clip = 1, checkpoint = args.dir ~= "" and { dir = args.dir, every = 4 } or nil, parallel = parallel }
end
]]

describe("a checkpoint of a pipeline", function()
  it("has every tensor once, and a resumed run continues with the same bits", function()
    support.write(dir .. "/job.lua", head .. "return job { pipeline = 2, schedule = 'zb_h1' }")
    local function train(to, words)
      local code, text = support.run(("%s/job.lua --dir %s %s"):format(dir, to, words or ""), { ranks = 4 })
      assert.are.equal(0, code, text)
    end
    local whole, cut = support.folder(), support.folder()
    train(whole)
    train(cut, "--steps 4")
    train(cut, "--resume auto")
    for _, file in ipairs { "model", "optim" } do
      local at = "/step-00000008/" .. file .. ".safetensors"
      assert.is_true(support.read(whole .. at) == support.read(cut .. at), file)
    end
    local names = {}
    for name in dt.sorted(dt.load(whole .. "/step-00000008/model.safetensors")) do names[#names + 1] = name end
    assert.are.same({ "0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight" }, names)
  end)
end)

describe("planning a pipeline", function()
  it("takes a value that doubles 64 times as one that every stage makes once: less than a second", function()
    support.write(dir .. "/doubles.lua", [[
      local dt = require "dtrain"
      local Net = dt.nn.module "Net"
      function Net:init() self.a, self.b = dt.nn.Linear(8, 8), dt.nn.Linear(8, 4) end
      function Net:forward(x)
        local m = dt.sigmoid(x)
        for _ = 1, 64 do m = m * m + m end
        return self.b(self.a(x) * m)
      end
      return dt.job { model = Net(), loss = dt.nn.MSE(), data = dt.data.synthetic { inputs = { 8 }, targets = { 4 }, samples = 64 },
        batch = { global = 8, micro = 2 }, steps = 3, optimizer = dt.optim.SGD { lr = 1e-2 }, parallel = { pipeline = 2 } }]])
    local began = os.time()
    local code, text = support.run(("plan %s/doubles.lua --ranks 2"):format(dir))
    assert.are.equal(0, code, text)
    assert.is_true(os.time() - began <= 1, text)
  end)
end)

describe("dtrain explain", function()
  it("says what batch.micro would do about a large bubble: (p - 1) / (m + p - 1)", function()
    local function note(micro)
      support.write(dir .. "/bubble.lua", head .. ("return job({ pipeline = 3 }, %d)"):format(micro))
      local code, text = support.run(("explain %s/bubble.lua --ranks 3"):format(dir))
      assert.are.equal(0, code, text)
      return text:match "note: ([^\n]*)"
    end
    assert.are.equal(("batch.micro = 2 makes 8 microbatches of it, and the bubble %.1f %%"):format(100 * 2 / 10), note(4))
    assert.is_nil(note(2))
  end)
  it("draws the chart of a schedule", function()
    support.write(dir .. "/chart.lua", head .. "return job({ pipeline = 2 }, 4)")
    local code, text = support.run(("explain %s/chart.lua --ranks 2"):format(dir))
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find("schedule 1f1b, 4 microbatches: 10 ticks, bubble 20.0 %", 1, true), text)
    assert.is_truthy(text:find("stage 0  F1 F2 .  B1 F3 B2 F4 B3 .  B4", 1, true), text)
    assert.is_truthy(text:find("stage 1  .  F1 B1 F2 B2 F3 B3 F4 B4 .", 1, true), text)
    assert.is_truthy(text:find("send pipeline to 1 f32", 1, true), text)
  end)
end)

describe("a GPT cut between blocks", function()
  it("sends one activation on and one gradient back, and its weight gradients stay where its weights are", function()
    support.write(dir .. "/gpt.lua", [[
      local dt = require "dtrain"
      return dt.job { model = dt.nn.GPT { vocab = 97, layers = 4, heads = 2, width = 16, context = 8 }, loss = dt.nn.CrossEntropy(), steps = 1,
        data = dt.data.synthetic { tokens = 97, context = 8, samples = 64 }, batch = { global = 8, micro = 2 }, precision = "bf16",
        optimizer = dt.optim.SGD { lr = 0.1 }, parallel = { pipeline = 2, stages = { 2, 2 } } }]])
    local code, text = support.run(("explain %s/gpt.lua --ranks 2"):format(dir))
    assert.are.equal(0, code, text)
    local sends, recvs = {}, {}
    for bytes in text:gmatch "send pipeline to 1 bf16 (%d+) bytes" do sends[#sends + 1] = tonumber(bytes) end
    for bytes in text:gmatch "recv pipeline from 1 bf16 (%d+) bytes" do recvs[#recvs + 1] = tonumber(bytes) end
    assert.are.same({ 2 * 8 * 16 * 2 }, sends, text)
    assert.are.same(sends, recvs, text)
  end)
end)

describe("a strategy of the script's own", function()
  it("has an axis of stages of another name, says where they begin and in which order they run", function()
    support.write(dir .. "/halves.lua", [[
      local dt = require "dtrain"
      local halves = {
        name = "halves",
        axes = function() return { { name = "half", size = 2, splits = "stages" } } end,
        cut = function() return { "blocks.1.norm1.weight" } end,
        schedule = { order = function(rank, _, micro)
          local order = {}
          for i = 1, micro do order[#order + 1] = { "F", i } end
          for i = micro, 1, -1 do order[#order + 1] = { "B", i } end
          return order
        end },
      }
      return dt.job { model = dt.nn.GPT { vocab = 33, layers = 3, heads = 2, width = 8, context = 8 }, loss = dt.nn.CrossEntropy(),
        data = dt.data.synthetic { tokens = 33, context = 8, samples = 64 }, batch = { global = 8, micro = 2 }, steps = 3,
        optimizer = dt.optim.AdamW { lr = 1e-2 }, parallel = { strategies = { halves } } }
    ]])
    for _, ranks in ipairs { 2, 4 } do
      local code, text = support.run(("check %s/halves.lua --ranks %d"):format(dir, ranks), { seconds = 100 })
      assert.are.equal(0, code, text)
      assert.is_truthy(text:find("equal: losses", 1, true), text)
    end
    local code, text = support.run(("explain %s/halves.lua --ranks 2"):format(dir))
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find("stage 1  .  F1 F2 F3 F4 B4 B3 B2 B1 .", 1, true), text)
    assert.is_truthy(text:find("send half to 1 f32 512 bytes", 1, true), text) -- one block's output of 2 rows
  end)
end)

describe("a pipeline that cannot be", function()
  -- what, the end of the script (its line 9), ranks, pattern of the message
  local own = "local function own(stage, stages, micro) %s end\n"
  local cases = {
    { "more stages than layers", "return job { pipeline = 8 }", 8, ":9: parallel: pipeline = 8 cuts the model into 8 stages, but only 3 .*pipeline = 3 would do" },
    { "an unknown schedule", "return job { pipeline = 2, schedule = '1f1' }", 2, ":9: .*no schedule \"1f1\"; did you mean '1f1b'" },
    { "chunks that a schedule has not", "return job { pipeline = 2, chunks = 2 }", 2, ":9: .*take schedule = \"interleaved\"" },
    { "too many blocks", "return job { pipeline = 2, stages = { 2, 2 } }", 2, "are 4 blocks, but the model has 3 %(0 to 4%); {1, 2} would do" },
    { "numbers of blocks for other stages", "return job { pipeline = 2, stages = { 1, 1, 1 } }", 2, ":9: .*3 numbers of blocks, but there are 2 stages" },
    { "names for other stages", "return job { pipeline = 2, stages = { 'a', 'b' } }", 2, ":9: .*name where stages 1 to 1 begin" },
    { "a name that no parameter has", "return job { pipeline = 2, stages = { '^9%.' } }", 2, "no parameter's name matches .%^9" },
    { "a name that stands first", "return job { pipeline = 2, stages = { '^0%.' } }", 2, "first of all" },
    { "a mesh that does not divide", "return job { pipeline = 3 }", 4, "4 ranks do not divide by pipeline 3 = 3; 3 or 6 ranks would" },
    { "a schedule that returns nothing", own:format "" .. "return job { pipeline = 2, schedule = own }", 2, ":9: schedule of the script: for stage 0 it returned nil" },
    { "a schedule of words", own:format "return { 'F1' }" .. "return job { pipeline = 2, schedule = own }", 2, ":9: .*action 1 is a string" },
    { "an unknown action", own:format "return { { 'G', 1 } }" .. "return job { pipeline = 2, schedule = own }", 2, ":9: .*action 1 is of kind G" },
    { "a microbatch that isn't there", own:format "return { { 'F', 9 } }" .. "return job { pipeline = 2, schedule = own }", 2, ":9: .*F of microbatch 9; microbatches are 1 to 8" },
    { "a schedule that loses a microbatch", own:format "return { { 'F', 1 }, { 'B', 1 } }" .. "return job { pipeline = 2, schedule = own }", 2,
      ":9: schedule of the script: stage 0 of 2 never runs F2" },
    { "a schedule that waits in a circle", own:format [[local o = {}
        for i = 1, micro do
          o[#o + 1] = { "F", i }
          if stage == 0 then o[#o + 1] = { "B", i } end
        end
        for i = 1, stage == 1 and micro or 0 do o[#o + 1] = { "B", i } end
        return o]] .. "return job { pipeline = 2, schedule = own }", 2, ":9: .*cannot run: stage %d waits in .* for .* of stage %d; stage %d waits in" },
  }
  for _, c in ipairs(cases) do
    it(c[1], function()
      support.write(dir .. "/bad.lua", head .. c[2])
      local code, text = support.run(("plan %s/bad.lua --ranks %d"):format(dir, c[3]))
      assert.is_true(code ~= 0)
      assert.is_truthy(text:find(c[4]), text)
    end)
  end
end)
