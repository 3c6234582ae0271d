-- luacheck: no max line length
-- Strategies written from the verbs alone, examples/strategies: each is at most so many lines, equals one process (or what
-- its comment says instead), and sends the bytes that theory gives.
require "dtrain" -- opens the searcher of what follows
local core = require "dtrain.core"
local support = require "support"

local dir = support.folder()

local function ok(words, options)
  options = options or {}
  options.seconds = 240
  local code, text = support.run(words, options)
  assert(code == 0, text)
  return text
end

local function script(name) return ("examples/strategies/%s.lua"):format(name) end

local function explained(name, ranks, words)
  support.write(dir .. "/out.json", ok(("explain %s --ranks %d --json %s"):format(script(name), ranks, words or "")))
  return core.json(dir .. "/out.json")
end

local micros -- of the last job that was explained
-- Of each "axis op dtype": how often in a step, bytes of the inputs, and what rank 0 sends; what is smaller than 64 bytes (losses,
-- norms) is left out.
local function sums(name, ranks, words)
  local e, out = explained(name, ranks, words), {}
  micros = e.microbatches
  for _, c in ipairs(e.collectives) do
    local key = ("%s %s %s"):format(c.axis, c.op, c.dtype)
    if c.bytes > 64 then
      local s = out[key] or { times = 0, bytes = 0, sent = 0, overlapped = 0 }
      s.times, s.bytes, s.sent = s.times + c.times, s.bytes + c.times * c.bytes, s.sent + c.times * c.sent
      s.overlapped = s.overlapped + (c.overlapped and 1 or 0)
      out[key] = s
    end
  end
  return out
end

local function near(want, got, what, slack) -- buckets are padded
  assert.is_true(got ~= nil and math.abs(got - want) <= (slack or 0.03) * want, ("%s: %s, not %s"):format(what, got, want))
end
local function only(s, ...)
  local known = {}
  for _, key in ipairs { ... } do known[key] = true end
  for key in pairs(s) do assert.is_true(known[key], "it also has " .. key) end
end

local gpt = 206208 * 4 -- bytes of the examples' GPT
local mlp = 2762 * 4

local function planned(name, words)
  local text = ok(("plan %s %s"):format(script(name), words))
  local bytes = text:match "optimizer states%s+([%d,]+)"
  return tonumber((bytes:gsub(",", ""))), text
end

-- A pipeline whose forwards, input gradients and weight gradients take a tick each: idle(n) ticks of a step beside `work` ticks for each
-- microbatch, most(n) chunks' activations at most, and gaps(n) idle ticks between a rank's first and last action.
local function bubble(work, idle, most, gaps)
  return function(_, n, words, name)
    local e = explained(name, n, ("%s --rank %d"):format(words, n - 1))
    local m, p = e.microbatches, e.pipeline
    assert.are.equal(16, m)
    assert.are.equal(work * m + idle(n), p.ticks)
    assert.is_true(math.abs(p.bubble - idle(n) / p.ticks) < 1e-9, p.bubble)
    for rank, actions in ipairs(p.actions) do
      assert.are.equal(most(n), p.in_flight[rank])
      local over, waits, i = actions[1].start, 0, 1
      while i <= #actions do
        local at, length = actions[i].start, 0
        repeat length, i = length + 1, i + 1 until not (actions[i] and actions[i].with)
        waits, over = waits + at - over, at + length
      end
      assert.are.equal(gaps(n, rank - 1), waits, ("idle ticks of rank %d"):format(rank - 1))
    end
    return e
  end
end
-- ZB-V (Qi et al. 2024): no rank idles between its first and last action, 2 n half-sized activations as 1F1B's n whole ones; what goes
-- from stage n - 1 to n, the turn of the V, stays on its rank.
local zb_v = bubble(6, function(n) return n - 1 end, function(n) return 2 * n end, function() return 0 end)
local function turn(_, n, words, name)
  local told = {}
  for _, c in ipairs(zb_v(_, n, words, name).collectives) do told[c.reason or ""] = c.peer end
  assert.are.equal(n - 2, told[("activations go from stage %d to %d"):format(n - 2, n - 1)])
  assert.are.equal(n - 2, told[("activations go from stage %d to %d"):format(n, n + 1)])
  for reason in pairs(told) do assert.is_nil(reason:find(("from stage %d to %d"):format(n - 1, n), 1, true), reason) end
end
-- DualPipe (DeepSeek-V3, 2024): (n / 2 - 1) (F&B + B - 3 W) is idle, where B = 2 W is a whole backward and F&B = F + B, and n + 1
-- activations are held; the copies' gradients, those of a whole model over all pairs, are added up two by two.
local dual = bubble(3, function(n) return (n // 2 - 1) * (3 + 2 - 3) end, function(n) return n + 1 end, function(n, rank)
  return n - 2 - math.min(rank, n - 1 - rank)
end)
local function copies(s, n, words, name)
  dual(s, n, words, name)
  local pairs_of = s["pipeline all_reduce f32"]
  assert.is_true(pairs_of and pairs_of.times <= 8, "few messages: " .. (pairs_of and pairs_of.times or "none"))
end
local function stages(n) return ("--pipeline %d"):format(n) end

-- name, lines at most, what explain shows for n ranks, { words = what it needs for n ranks, reference = the script that it equals on as many
-- ranks; nil: one process }
local examples = {
  { "ddp_from_scratch", 25, function(s, n)
    only(s, "replica all_reduce f32")
    local r = s["replica all_reduce f32"]
    near(gpt, r.bytes, "gradients")
    near(2 * (n - 1) / n * gpt, r.sent, "sent")
    assert.is_true(r.times > 5 and r.overlapped >= 0.8 * r.times, "buckets beside backward: " .. r.overlapped)
  end },
  { "zero1_from_scratch", 40, function(s, n)
    only(s, "replica reduce_scatter f32", "replica all_gather f32")
    near((n - 1) / n * gpt, s["replica reduce_scatter f32"].sent, "gradients")
    near((n - 1) / n * gpt, s["replica all_gather f32"].sent, "parameters")
    near(2 * gpt / n, planned("zero1_from_scratch", "--ranks " .. n), "states")
  end },
  { "hsdp", 25, function(s, n)
    near(micros * gpt / 2, s["shard reduce_scatter f32"].sent, "gradients in a group")
    near(2 * gpt / 2, planned("hsdp", "--ranks " .. n), "states")
    if n == 2 then return only(s, "shard reduce_scatter f32", "shard all_gather f32") end
    only(s, "shard reduce_scatter f32", "shard all_gather f32", "replica all_reduce f32")
    near(micros * gpt / 2, s["replica all_reduce f32"].bytes, "shares across groups")
  end },
  -- eight-bit gathers: a quarter of the bytes, and a scale for each block of 256
  { "quantised_gather", 40, function(s, n)
    only(s, "data reduce_scatter f32", "data all_gather u8", "data all_gather f32")
    local u8, scales, buckets = s["data all_gather u8"], s["data all_gather f32"], s["data reduce_scatter f32"].times / micros
    near(gpt / 4 / n, u8.bytes / u8.times * buckets, "bytes of a share")
    near(u8.bytes * 4 / 256, scales.bytes, "scales")
  end, { reference = "quantised_whole" } },
  { "ulysses", 15, function(s, n) -- two layers: three into attention and one out, there and back
    local a = s["context all_to_all f32"]
    assert.are.equal(2 * 4 * 2, a.times)
    assert.are.equal(a.times * 8 * 32 // n * 64 * 4, a.bytes) -- each a part of [batch, time, width]
    assert.is_nil(s["context all_gather f32"])
    local function activations(words)
      return tonumber((ok("plan " .. script "ulysses" .. words):match "activations%s+([%d,]+)":gsub(",", "")))
    end
    local whole, part = activations " --ranks 1", activations(" --ranks " .. n)
    assert.is_true(part < 1.15 * whole / n, ("%d of %d"):format(part, whole))
  end },
  { "moe", 30, function(s, n) -- there and back, forward and backward, of [8 experts, 8 samples x 5 seats, 32]
    local a = s["experts all_to_all f32"]
    assert.are.equal(4, a.times)
    assert.are.equal(4 * 8 * 8 * 5 // n * 32 * 4, a.bytes)
    assert.is_nil(s["experts all_gather f32"])
  end },
  { "ring_attention", 60, function(s, n) -- keys and values of [batch, time, width] to the neighbour, n - 1 times each way
    only(s, "ring shift f32", "ring all_reduce f32")
    local a = s["ring shift f32"]
    assert.are.equal(2 * 2 * (n - 1), a.times)
    assert.are.equal(2 * 2 * (n - 1) * 2 * 8 * 32 // n * 64 * 4, a.sent)
  end },
  { "tensor_2d", 40, function(s, n) -- three products: inputs along the columns, weights along the rows
    local rows, weights, inputs = n // 2, 64 * 128 + 128 * 128 + 128 * 16, 64 + 128 + 128
    assert.are.equal(32 // rows * inputs // 2 * 4, s["col all_gather f32"].bytes)
    assert.are.equal(32 // rows * (128 + 128) * 4, s["col reduce_scatter f32"].bytes) -- the job's inputs have no gradient
    if rows > 1 then
      assert.are.equal(weights // n * 4, s["row all_gather f32"].bytes)
      assert.are.equal(weights // 2 * 4, s["row reduce_scatter f32"].bytes)
    end
    local _, text = planned("tensor_2d", "--ranks " .. n)
    near((weights / n + 272 / 2) * 4, tonumber((text:match "parameters%s+([%d,]+)":gsub(",", ""))), "parameters")
  end },
  { "conv_channels", 40, function(s, n) -- behind each pair; before the second there and back (images have no gradient)
    only(s, "channels all_reduce f32", "channels all_gather f32")
    assert.are.equal(16 * (16 * 16 * 16 + 32 * 8 * 8 + 16 * 8 * 8) * 4, s["channels all_reduce f32"].bytes)
    if s["channels all_gather f32"] then assert.is_true(s["channels all_gather f32"].bytes <= 2 * (16 + 32) * 4 // n) end -- statistics
  end },
  { "own_rule", 25, function(s, n) -- the mean over rows of [16, 64], and the products' gradients; no images
    only(s, "rows all_reduce f32")
    local convolutions = 32 * 3 * 4 * 4 + 32 + 64 * 32 * 2 * 2 + 64
    near(16 * 64 * 4 + convolutions * 4, s["rows all_reduce f32"].bytes, ("means and gradients, %d ranks"):format(n))
  end },
  { "clip_contrastive", 25, function(s, n) -- features of images and texts
    assert.are.equal(2 * 32 // n * 16 * 4, s["data all_gather f32"].bytes)
    assert.are.equal(2 * 32 * 16 * 4, s["data reduce_scatter f32"].bytes)
  end },
  { "zb_v", 30, turn, { words = stages } },
  { "dualpipe", 60, copies, { words = stages } },
  { "two_optimizers", 25, function(s, n) -- the judge's 4 tensors, in whole blocks of 64 numbers, and equally many blocks a rank
    only(s, "data all_reduce f32")
    assert.are.equal(-(-4 // n) * n * 64 * 4, s["data all_reduce f32"].bytes)
  end },
  { "gossip", 25, function(s)
    only(s, "ring shift f32")
    near(2 * mlp, s["ring shift f32"].sent, "to both neighbours")
  end, { reference = "gossip_dense" } },
  { "ema", 25, function(s, n)
    only(s, "data all_reduce f32")
    near(3 * mlp, planned("ema", "--ranks " .. n), "states", 0.15) -- so small a model is padded by up to a ninth
    near(3 * mlp / n, planned("ema", ("--ranks %d --parallel zero=1"):format(n)), "states in shares", 0.15)
  end },
}
describe("a strategy from the verbs:", function()
  for _, c in ipairs(examples) do
    local name, most, shows, o = table.unpack(c)
    o = o or {}
    local function words(n) return o.words and o.words(n) or "" end
    it(("%s has at most %d lines"):format(name, most), function()
      local n = 0
      for _ in io.lines(script(name)) do n = n + 1 end
      assert.is_true(n <= most, n)
    end)
    for _, n in ipairs { 2, 4, 8 } do
      it(("%s sends what theory says, %d ranks"):format(name, n), function() shows(sums(name, n, words(n)), n, words(n), name) end)
    end
    for _, n in ipairs { 2, 4, 8 } do
      it(("%s equals %s, %d ranks"):format(name, o.reference or "one process", n), function()
        local reference = o.reference and (" --reference tests/dist/%s.lua"):format(o.reference) or ""
        ok(("check %s --ranks %d %s%s"):format(script(name), n, words(n), reference))
      end)
    end
  end
  it("quantised_gather loses at most 1 % against full gathers", function()
    local function last(words)
      local text = ok(words, { ranks = 2 })
      return tonumber(text:match ".*loss ([%d.]+)")
    end
    local full = last(script "zero1_from_scratch" .. " --steps 20")
    local eight = last(script "quantised_gather" .. " --steps 20")
    assert.is_true(math.abs(eight - full) < 0.01 * full, ("%g, %g"):format(eight, full))
  end)
  it("zero1_from_scratch's states are saved, and loaded by other numbers of ranks", function()
    local out = dir .. "/z1"
    local function losses(words, n) return ok(("%s --out %s %s"):format(script "zero1_from_scratch", out, words), { ranks = n }) end
    losses("--steps 6", 2)
    local text = losses("--steps 9 --resume auto", 4)
    local straight = ok(("%s --steps 9"):format(script "zero1_from_scratch"), { ranks = 2 })
    local a, b = tonumber(text:match ".*step 9/9%s+loss ([%d.]+)"), tonumber(straight:match ".*step 9/9%s+loss ([%d.]+)")
    assert.is_true(a and b and math.abs(a - b) < 2e-4 * b, text .. straight)
  end)
  it("ema's average is saved", function()
    ok(script "ema" .. " --steps 3 --out " .. dir .. "/ema")
    local found = false
    for path in io.popen("find " .. dir .. "/ema -name '*.safetensors'"):lines() do
      for key in pairs(core.load(path)) do found = found or key:find("ema", 1, true) ~= nil end
    end
    assert.is_true(found)
  end)
  it("gossip among three is the mean of all, so it equals one process", function()
    local function losses(n)
      local out = {}
      for loss in ok(script "gossip" .. " --steps 10", { ranks = n }):gmatch "loss ([%d.]+)" do out[#out + 1] = loss end
      return table.concat(out, " ")
    end
    assert.are.equal(losses(1), losses(3))
  end)
  it("replicas of gossip differ, and their mean falls", function()
    local text = ok(script "gossip" .. " --steps 40", { ranks = 4 })
    local first, last = tonumber(text:match "loss ([%d.]+)"), tonumber(text:match ".*loss ([%d.]+)")
    assert.is_true(last < first, text)
  end)
end)

-- A table of code in docs/parallelism.md as a strategy of a GPT's job.
local function documented(name, parallel)
  for block in support.read "docs/parallelism.md":gmatch "```lua\n(.-)```" do
    if block:find("^local " .. name .. " = ") then
      support.write(dir .. "/documented.lua", ([[local dt = require "dtrain"
%s
return dt.job { model = dt.nn.GPT { vocab = 64, layers = 4, heads = 4, width = 32, context = 16 }, loss = dt.nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 64, context = 16, samples = 64 }, batch = 8, optimizer = dt.optim.SGD { lr = 0.1 }, steps = 16,
  parallel = { strategies = { %s }, %s } }]]):format(block, name, parallel or ""))
      return dir .. "/documented.lua"
    end
  end
  error("docs/parallelism.md has no example " .. name)
end

describe("an example of docs/parallelism.md:", function()
  for _, c in ipairs { { "columns", "columns = 2" }, { "careful" }, { "tight", "below = 3e5" } } do
    it(c[1] .. " equals one process", function() ok(("check %s --ranks 2"):format(documented(table.unpack(c)))) end)
  end
  it("tight keeps activations below its limit", function()
    local function activations(words)
      return tonumber((ok(("plan %s --ranks 2 %s"):format(documented("tight", "below = 3e5"), words)):match "activations%s+([%d,]+)"
        :gsub(",", "")))
    end
    assert.is_true(activations "" <= 3e5)
    assert.is_true(activations "--parallel below=1e9" > 3e5)
  end)
  it("meet averages all parameters every eighth step, and sends nothing else", function()
    support.write(dir .. "/out.json", ok(("explain %s --ranks 2 --json"):format(documented "meet")))
    local bytes = 0
    for _, c in ipairs(core.json(dir .. "/out.json").collectives) do
      if c.bytes > 64 then
        assert.are.same({ "all_reduce", "every 8 steps" }, { c.op, c.when })
        bytes = bytes + c.bytes
      end
    end
    -- each of 4 layers has 12 squares of the width, 13 of it in biases and norms; around them 64 tokens, 16 places and the last norm
    assert.are.equal(4 * (4 * (12 * 32 ^ 2 + 13 * 32) + (64 + 16 + 2) * 32), bytes)
  end)
end)

-- What lies divided over an axis of the script's own: body gives y of x, [8, 8, 4, 4], whose dim is divided.
local function divided(dim, body)
  support.write(dir .. "/divided.lua", ([[
local dt = require "dtrain"
local nn = dt.nn
local own = { axes = function() return { { name = "own", size = "auto" } } end }
function own.place(g) g:place("inputs", { own = "S(%d)" }) end
local Net = nn.module "Net"
function Net:init() self.first, self.norm, self.last = nn.Conv2d(8, 8, 3, { padding = 1 }), nn.BatchNorm2d(8), nn.Linear(128, 4) end
function Net:forward(x)
  local y = %s
  return self.last(y:reshape { y:size(0), 128 })
end
return dt.job { model = Net(), loss = nn.CrossEntropy(), data = dt.data.synthetic { inputs = { 8, 4, 4 }, classes = 4, samples = 64 },
  batch = 8, optimizer = dt.optim.SGD { lr = 0.1 }, steps = 2, parallel = { strategies = { own } } }]]):format(dim, body))
  support.write(dir .. "/out.json", ok(("explain %s/divided.lua --ranks 2 --json"):format(dir)))
  return core.json(dir .. "/out.json")
end

describe("a value that is divided over an axis of the script's own", function()
  local used = { { "dropout", 1, "dt.dropout(x, 0.5)" }, { "batch norm over channels", 1, "self.norm(x)" },
    { "attention over time", 1, "dt.attention(x, x, x, { bthd = true, causal = true })" },
    { "rotary over time", 1, "dt.rotary(x, { bthd = true })" }, { "convolution over input channels", 1, "self.first(x)" } }
  for _, c in ipairs(used) do
    it(("is not gathered for %s, which has a rule"):format(c[1]), function()
      assert.are.same({}, divided(c[2], c[3]).gathered)
    end)
  end
  it("is gathered where an operation has no rule, and explain and check say so with operation, line and bytes", function()
    local bytes = 8 * 8 * 4 * 4 * 4
    local e = divided(2, "self.first(x)")
    assert.are.equal(1, #e.gathered)
    local g = e.gathered[1]
    assert.are.same({ "conv2d", "own", 2, bytes }, { g.op, g.axis, g.dim, g.bytes })
    assert.is_truthy(g.line:find "divided.lua:8$", g.line)
    local warning = 'warning: conv2d %([^\n]*divided%.lua:8%) has no placement rule [^\n]*over "own" by dim 2: 4,096 bytes are gathered'
    for _, verb in ipairs { "explain", "check" } do
      local text = ok(("%s %s/divided.lua --ranks 2"):format(verb, dir))
      assert.is_truthy(text:find(warning), text)
      assert.is_falsy(text:find("warning.*warning"), text)
    end
  end)
end)
