-- luacheck: no max line length
-- dtrain plan and dtrain explain: volumes against closed forms, planned memory against what a run allocates, thousands of ranks.
require "dtrain" -- opens the searcher of what follows
local core = require "dtrain.core"
local formulas = require "dtrain.formulas"
local support = require "support"

local dir = support.folder()

local function ok(words, options)
  local code, text = support.run(words, options)
  assert(code == 0, text)
  return text
end

-- A job on `ranks` ranks, as JSON of `explain`; body: fields of dt.job beside the model's.
local function explain(body, ranks, words)
  support.write(dir .. "/job.lua", ([[
local dt = require "dtrain"
local nn = dt.nn
return dt.job { loss = nn.MSE(), steps = 1, optimizer = dt.optim.AdamW { lr = 0.1 }, %s }]]):format(body))
  support.write(dir .. "/out.json", ok(("explain %s/job.lua --ranks %d --json %s"):format(dir, ranks, words or "")))
  return core.json(dir .. "/out.json")
end

-- Bytes that rank 0 sends in a step, by "axis op"; what is smaller than 64 bytes (losses, norms) left out.
local function sent(e)
  local out = {}
  for _, c in ipairs(e.collectives) do
    local key = c.axis .. " " .. c.op
    if c.bytes > 64 then out[key] = (out[key] or 0) + c.times * c.sent end
  end
  return out
end

local regression = [[data = dt.data.synthetic { inputs = { 64 }, targets = { 64 }, samples = 64 }, batch = { global = 16, micro = %d },
  model = nn.Sequential { nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64) }, parallel = { %s }]]
local parameters = 64 * 256 + 256 + 256 * 64 + 64

describe("dtrain explain --passes", function()
  it("lists each pass with its nodes and time", function()
    local text = ok("explain examples/strategies/mesh_3d.lua --ranks 8 --passes")
    local at = 0
    for _, name in ipairs { "place", "grad", "update", "precision", "recompute", "stage", "reduce", "totals", "fuse", "bucket", "order", "memory" } do
      local from, to, before, after, ms = text:find("\n" .. name .. " +(%d+) +(%d+) +([%d.]+)", at)
      assert.is_truthy(from, name .. " is missing, or stands elsewhere:\n" .. text)
      assert.is_true(tonumber(before) > 0 and tonumber(after) > 0 and tonumber(ms) >= 0)
      at = to
    end
  end)
end)

describe("dtrain explain --json", function()
  for zero = 0, 2 do
    it(("has ZeRO-%d send %d times the parameters"):format(zero, formulas.zero_volume(zero)), function()
      local e = explain(regression:format(4, ("zero = %d"):format(zero)), 4)
      local sum = 0
      for _, bytes in pairs(sent(e)) do sum = sum + bytes end
      local want = formulas.zero_volume(zero) * parameters * 4 * 3 // 4
      assert.is_true(math.abs(sum - want) <= 0.01 * want, ("%d bytes, not %d"):format(sum, want)) -- buckets are padded
    end)
  end
  -- three batch norms of 4 channels: a mean and a variance of each
  local norms = [[data = dt.data.synthetic { inputs = { 4, 6, 6 }, targets = { 8 }, samples = 64 }, batch = { global = 16, micro = 4 },
    model = (function()
      local layers = {}
      for _ = 1, 3 do layers[#layers + 1] = nn.BatchNorm2d(4) layers[#layers + 1] = nn.Conv2d(4, 4, 3, { padding = 1 }) end
      layers[#layers + 1] = nn.Flatten()
      layers[#layers + 1] = nn.Linear(144, 8)
      return nn.Sequential(layers)
    end)(), parallel = { %s }]]
  local whole = "loss and count are those of all ranks; 6 running statistics (24 numbers) become the mean over replicas"
  for _, c in ipairs { { "", 2, { { "data", 2 + 24, whole } } }, { "zero = 3", 2, { { "data", 2 + 24, whole } } },
    { "tensor = 2", 2, { { "tensor", 2, "loss and count are those of all ranks" } } },
    { "tensor = 2, data = 2", 4, { { "data x tensor", 2 + 24, whole } } }, { "independent = true", 2, { { "data", 2, "all ranks" } } },
    { "pipeline = 2, data = 2", 4, { { "pipeline x data", 2, "those of the last stage" }, { "data", 16, "4 running statistics" } } } } do
    it(("has one message for the loss, the count and running statistics under { %s }"):format(c[1]), function()
      local got = {}
      for _, m in ipairs(explain(norms:format(c[1]), c[2]).collectives) do
        if m.reason:find "loss and count" or m.reason:find "running statistics" then
          got[#got + 1] = { m.axis, m.bytes // 8, m.reason, m.times, m.reduction }
        end
      end
      assert.are.equal(#c[3], #got)
      for i, want in ipairs(c[3]) do
        assert.are.same({ want[1], want[2], 1, "sum" }, { got[i][1], got[i][2], got[i][4], got[i][5] })
        assert.is_truthy(got[i][3]:find(want[3], 1, true), got[i][3])
      end
    end)
  end
  it("has ZeRO-3 send 3 times the parameters, less what backward finds still gathered", function()
    local e = explain([[data = dt.data.synthetic { inputs = { 64 }, targets = { 64 }, samples = 64 }, batch = 16, model = (function()
      local layers = {}
      for _ = 1, 24 do layers[#layers + 1] = nn.Linear(64, 64, { bias = false }) layers[#layers + 1] = nn.Tanh() end
      return nn.Sequential(layers)
    end)(), parallel = { zero = 3, resident = 0, gradient = { bucket_mb = 1 / 64, first_bucket_mb = 1 / 64 } }]], 4)
    local layer, all = 64 * 64 * 4 * 3 // 4, sent(e)
    assert.are.equal(24 * layer, all["data reduce_scatter"])
    local gathers = all["data all_gather"] // layer
    assert.is_true(gathers >= 2 * 24 - 4 and gathers <= 2 * 24, gathers)
  end)
  it("counts what happens in each microbatch as often as that is", function()
    local one, four = sent(explain(regression:format(4, "zero = 2"), 4)), sent(explain(regression:format(1, "zero = 2"), 4))
    assert.are.equal(4 * one["data reduce_scatter"], four["data reduce_scatter"])
    assert.are.equal(one["data all_gather"], four["data all_gather"])
  end)
  it("has tensor parallelism reduce one activation forward and none backward that nobody asks for", function()
    local e = explain(regression:format(8, "tensor = 2"), 2)
    -- the second product's partial sums, f32[8, 64], in each of two microbatches; inputs need no gradient
    assert.are.same({ ["tensor all_reduce"] = 2 * 8 * 64 * 4 }, sent(e))
    assert.are.equal(2, e.microbatches)
  end)
  it("has a pipeline send an activation on and a gradient back", function()
    local e = explain(regression:format(4, "pipeline = 2, stages = { '2.weight' }"), 2)
    assert.are.same({ ["pipeline send"] = 4 * 4 * 256 * 4, ["pipeline recv"] = 0 }, sent(e))
    assert.are.equal(2, #e.pipeline.actions)
    assert.are.equal(8, #e.pipeline.actions[1])
    assert.are.equal(0.2, tonumber(("%.6g"):format(e.pipeline.bubble)))
    local other = explain(regression:format(4, "pipeline = 2, stages = { '2.weight' }"), 2, "--rank 1")
    assert.are.equal(1, other.rank)
    assert.are.equal("recv", other.collectives[1].op)
  end)
  it("adds the entries up to the totals, and tells reason, place and what is beside", function()
    local e, sums = explain(regression:format(4, "data = 2, tensor = 2, zero = 1"), 4), {}
    assert.is_true(#e.collectives > 3)
    for _, c in ipairs(e.collectives) do
      local key = ("%s %s %d"):format(c.axis, c.op, c.ranks)
      sums[key] = (sums[key] or 0) + c.times * c.sent
      assert.is_truthy(c.reason)
      assert.is_truthy(c.line:find "job.lua:%d+$")
      assert.is_truthy(c.beside:find "overlap")
    end
    for _, t in ipairs(e.totals) do
      local key = ("%s %s %d"):format(t.axis, t.op, t.ranks)
      assert.are.equal(sums[key], t.sent, key)
      sums[key] = nil
    end
    assert.is_nil(next(sums))
  end)
  it("is empty lists for one rank", function()
    assert.is_truthy(ok("explain examples/linear.lua --json"):find('"collectives":[],"totals":[]', 1, true))
  end)
  it("names ranks that are there", function()
    local code, text = support.run "explain examples/linear.lua --ranks 2 --rank 2"
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find("--rank 2 is none of the 2 ranks; 0 to 1 are", 1, true), text)
  end)
end)

-- Total by rank, from the table of `plan`.
local function totals(text)
  local out, heads, n = {}, {}, 0
  for a, b in text:match "\nbytes +([^\n]*)":gmatch "ranks? (%d+)%-?(%d*)" do heads[#heads + 1] = { tonumber(a), tonumber(b) or tonumber(a) } end
  for number in text:match "\ntotal +([^\n]*)":gmatch "[%d,]+" do
    n = n + 1
    for rank = heads[n][1], heads[n][2] do out[rank] = math.tointeger((number:gsub(",", ""))) end
  end
  return out
end

describe("dtrain plan", function()
  it("says what each of eight ranks allocates with zero 3, tensor 2 and pipeline 2", function()
    support.write(dir .. "/run.lua", ([[
      local dt = require "dtrain"
      local engine = dt.engine(dt.job { model = dt.nn.GPT { vocab = 97, layers = 4, heads = 2, width = 16, context = 8 },
        loss = dt.nn.CrossEntropy(), data = dt.data.synthetic { tokens = 97, context = 8, samples = 64 }, steps = 1,
        batch = { global = 8, micro = 2 }, optimizer = dt.optim.AdamW { lr = 0.1 }, clip = 1.0, precision = "bf16",
        parallel = { tensor = 2, pipeline = 2, zero = 3, resident = 0, gradient = { bucket_mb = 0.01 } } })
      for _, batch in engine:batches() do engine:step(batch) end
      local f = assert(io.open("%s/rank" .. dt.rank(), "w"))
      f:write(engine.exec:memory().total)
      f:close()]]):format(dir))
    local planned = totals(ok(("plan %s/run.lua --ranks 8 --threads 1"):format(dir)))
    ok(("%s/run.lua --quiet --threads 1"):format(dir), { ranks = 8, seconds = 120 })
    for rank = 0, 7 do assert.are.equal(tonumber(support.read(("%s/rank%d"):format(dir, rank))), planned[rank], "rank " .. rank) end
  end)
  it("plans 175 billion parameters on 4096 ranks that are not there", function()
    local text = ok "plan examples/strategies/gpt_175b.lua --ranks 4096"
    local all, largest = totals(text), 0
    for rank = 0, 4095 do largest = math.max(largest, all[rank]) end
    local from, to, bytes = text:match "the largest: ranks (%d+)%-(%d+), ([%d,]+) bytes"
    assert.are.equal(largest, tonumber((bytes:gsub(",", ""))))
    -- the first stages hold the most microbatches' activations
    assert.are.equal("0", from)
    assert.are.equal("511", to)
    -- parameters of 8 x 8 parts: gradients in f32 of the largest are those of 12 blocks' parts, of the embedding and of positions
    local width = 12288
    local block = 12 * width ^ 2 // 8 + (4 * width + 3 * width) // 8 + 6 * width
    local want = 4 * (12 * block + 51200 // 8 * width + 2048 * width)
    local gradients = tonumber((text:match "\ngradients +([%d,]+)":gsub(",", "")))
    assert.is_true(math.abs(gradients - want) < 0.001 * want, ("%d, not %d"):format(gradients, want))
    for _, words in ipairs { "bubble 8.9 %", "memory by the closed form", "reduce_scatter" } do
      assert.is_truthy(text:find(words, 1, true), words)
    end
  end)
  it("lays many columns on their side", function()
    local text = ok "plan examples/strategies/gpt_175b.lua --ranks 128 --parallel pipeline=16,tensor=8,chunks=1,schedule=1f1b,stages=auto"
    assert.is_truthy(text:find "\nbytes +parameters +gradients")
    assert.is_truthy(text:find "\nranks 120%-127 +[%d,]+")
  end)
end)

describe("one traced model", function()
  local dt = require "dtrain"
  local strategies, trace = require "dtrain.strategy", require "dtrain.trace"
  local cli = require "dtrain.cli"
  local calls
  -- A job whose model counts how often it is traced; layer: a module instead of its second one, or nil.
  local function job_of(layer)
    cli.capture, calls = true, 0
    local a, b = dt.nn.Linear(8, 16), layer or dt.nn.Linear(16, 8)
    local job = dt.job { loss = dt.nn.MSE(), steps = 1, optimizer = dt.optim.AdamW { lr = 0.1, no_decay = true }, batch = 32, clip = 1,
      data = dt.data.synthetic { inputs = { 8 }, targets = { 8 }, samples = 64 },
      model = dt.nn.Sequential { a, function(x)
        calls = calls + 1
        return x:gelu()
      end, b, dt.nn.Linear(8, 8), dt.nn.Linear(8, 8) } }
    cli.capture = false
    return job
  end
  local function plan(job, p, rank, ranks, traced)
    local s = strategies.new(p)
    local mesh = s:mesh(ranks)
    local at, replicas = strategies.among(mesh, rank, "samples")
    return (trace.train(job, { rows = 8, threads = 1, micros = { 2 }, traced = traced, parallel = s,
      where = { ranks = ranks, rank = rank, mesh = mesh, data = at, replicas = replicas, copies = replicas } }))
  end
  local list = { { data = 4 }, { data = 4, zero = 1 }, { data = 4, zero = 3, resident = 0 }, { data = 2, tensor = 2 }, { data = 2, pipeline = 2 },
    { data = 4, recompute = "full" }, { data = 2, tensor = 2, zero = 2 }, { data = 4 } }

  it("is compiled for any strategy and rank, each plan what a fresh trace gives", function()
    local job, traced = job_of(), {}
    local texts = {}
    for i, p in ipairs(list) do
      for rank = 0, 3 do texts[#texts + 1] = { i, rank, plan(job, p, rank, 4, traced):text() } end
    end
    assert.are.equal(1, calls)
    for _, t in ipairs(texts) do
      assert.are.equal(plan(job_of(), list[t[1]], t[2], 4, {}):text(), t[3], ("strategy %d, rank %d"):format(t[1], t[2]))
    end
  end)

  it("that names an axis is traced once for each mesh", function()
    local job, traced = job_of(dt.nn.Linear(16, 8, { place = { weight = { tensor = "S(1)" } } })), {}
    for _, p in ipairs { { data = 4 }, { data = 4, zero = 1 }, { data = 2, tensor = 2 }, { data = 2, tensor = 2, zero = 1 } } do
      for rank = 0, 3 do plan(job, p, rank, 4, traced) end
    end
    assert.are.equal(2, calls)
  end)

  it("has an optimizer that is traced once for each group, dtype and shape", function()
    local job, asked = job_of(), 0
    local of = getmetatable(job.optimizer).__index
    local value = of.value
    of.value = function(...)
      asked = asked + 1
      return value(...)
    end
    local text = plan(job, { data = 4, zero = 1 }, 0, 4, {}):text()
    assert.are.equal(5, asked) -- of eight parameters: weights 16x8, 8x16 and twice 8x8, biases 16 and three times 8
    local each = { name = "each", update = function(entry) return entry:optimizer(entry.grad) end } -- is asked for every parameter
    assert.are.equal(plan(job_of(), { data = 4, zero = 1, strategies = { each } }, 0, 4, {}):text(), text)
    of.value = value
    assert.are.equal(13, asked)
  end)
end)
