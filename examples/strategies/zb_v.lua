-- ZB-V (Qi et al. 2024): stages 0 .. n - 1 go down the ranks, n .. 2 n - 1 up again. When F, B and W take as long, no rank idles
-- between its first and its last action; it holds as much as 1F1B. dtrain explain examples/strategies/zb_v.lua --ranks 4 draws it.
local dt = require "dtrain"
local args = dt.args { pipeline = 4, micros = 8, steps = 20 }
local function order(rank, ranks, micro)
  local list, n = {}, { F1 = 0, F2 = 0, B1 = 0, B2 = 0, W1 = 0, W2 = 0 }
  local total = math.max(micro, 2 * ranks - 1) -- fewer than that leave out the actions that there are too many of
  local function add(times, ...)
    for _ = 1, times do
      for _, what in ipairs { ... } do
        n[what] = n[what] + 1
        if n[what] <= micro then list[#list + 1] = { what:sub(1, 1), n[what], tonumber(what:sub(2)) } end
      end
    end
  end
  add(2 * (ranks - rank) - 1, "F1")
  add(rank, "F2", "F1")
  add(ranks - rank, "F2", "B2", "W2")
  while n.F2 < total do add(n.F1 < total and 1 or 0, "F1") add(1, "B1", "W1", "F2", "B2", "W2") end
  add(rank, "B1", "B2")
  add(ranks - rank, "B1", "W1")
  add(total - n.W2, "W2") add(total - n.W1, "W1")
  return list
end
local function v(stage, ranks) return stage < ranks and stage or 2 * ranks - 1 - stage end
return dt.job { model = dt.nn.GPT { vocab = 64, layers = 16, heads = 4, width = 32, context = 16 }, loss = dt.nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 64, context = 16, samples = 512 }, batch = { global = args.micros, micro = 1 },
  optimizer = dt.optim.AdamW { lr = 1e-3 }, steps = args.steps,
  parallel = { pipeline = args.pipeline, chunks = 2, schedule = { place = v, order = order } } }
