-- DualPipeV, the V half of DualPipe (DeepSeek-AI 2024; cut in half by Sea AI Lab): each rank has a stage of the way down the ranks and
-- one of the way up, and in the steady part a forward of one and a backward of the other are one action (F8a+B4b in the chart), so
-- that a
-- device with two streams can run the one's messages under the other's products. It holds 2 n + 1 half-sized activations and idles
-- (n - 1) W when F, B and W take as long; the published (n - 1)(F&B + B - 3 W) lets the next rank wait for gradients of weights too.
-- The full DualPipe keeps every stage twice; this V need not.   dtrain explain examples/strategies/dualpipe.lua --ranks 4 draws it.
local dt = require "dtrain"
local args = dt.args { pipeline = 4, micros = 8, steps = 20 }

local function order(rank, ranks, micro)
  if micro < 2 * ranks then
    error(("DualPipeV wants %d microbatches or more on %d ranks, not %d; batch.micro sets their size"):format(2 * ranks, ranks, micro),
      0)
  end
  local list, n, weights = {}, {}, {}
  local function add(action) list[#list + 1] = action end
  local function next_of(kind, chunk)
    n[kind .. chunk] = (n[kind .. chunk] or 0) + 1
    return { kind, n[kind .. chunk], chunk }
  end
  local function forward(chunk) add(next_of("F", chunk)) end
  local function weight() add(table.remove(weights, 1)) end
  local function backward(chunk, later) -- the weights' gradients at once, or when `weight` asks for them
    local b = next_of("B", chunk)
    add(b)
    weights[#weights + 1] = { "W", b[2], chunk }
    if not later then add(table.remove(weights)) end
  end
  local function both(f, b)
    local action = next_of("F", f)
    action.with = next_of("B", b)
    add(action)
    add { "W", action.with[2], b }
  end
  local below, half = ranks - rank - 1, (rank + 1) // 2
  for _ = 1, 2 * below do forward(1) end
  for _ = 0, rank do forward(1) forward(2) end
  for _ = 1, below do backward(2, true) weight() forward(2) end
  for i = 1, micro - 2 * ranks + rank + 1 do
    if i == 1 and below == 0 then forward(1) backward(2) else both(1, 2) end
    both(2, 1)
  end
  for _ = 1, below do backward(2) both(2, 1) end
  for i = 0, rank do
    backward(2, i > half or i == half and rank % 2 == 1)
    backward(1, i >= half)
  end
  for _ = 1, below do weight() backward(1, true) end
  for _ = 0, rank do weight() end
  return list
end

local function v(stage, ranks) return stage < ranks and stage or 2 * ranks - 1 - stage end
return dt.job { model = dt.nn.GPT { vocab = 64, layers = 16, heads = 4, width = 32, context = 16 }, loss = dt.nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 64, context = 16, samples = 512 }, batch = { global = args.micros, micro = 1 },
  optimizer = dt.optim.AdamW { lr = 1e-3 }, steps = args.steps,
  parallel = { pipeline = args.pipeline, chunks = 2, schedule = { place = v, order = order } } }
