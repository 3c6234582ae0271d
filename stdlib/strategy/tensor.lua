-- Tensor parallelism: layers are divided over the axis "tensor" (Shoeybi et al. 2019), and sequences too between them
-- (Korthikanti et al. 2022). It reads the traced graph alone: where a product feeds another through operations that
-- work within a column (activations, heads of attention), the first is divided by its outputs and the second by its
-- inputs, so that one reduction serves both. Embeddings and the product that feeds the cross-entropy are divided by
-- vocabulary. What a script places itself (nn.Linear { ..., place = }) stays.
local util = require "dtrain.util"

local T = { name = "tensor", options = { { "tensor", "count", 1 }, { "sequence", "boolean", false } } }

--- parallel = { tensor = ranks, sequence = false }
function T.check(p)
  if p.sequence and p.tensor == 1 then
    util.fail("dt.job: parallel: sequence = true divides sequences over the axis tensor; give tensor = 2 or more")
  end
end

function T.axis(p) return "tensor", p.tensor end

-- operations that a value passes divided by its last dim or by heads; others end a chain
local inside = {}
for name in ([[reshape permute split copy attention rotary dropout cast relu gelu gelu_tanh silu tanh sigmoid softplus
  add sub mul div square abs sqrt neg exp maximum minimum clamp stop_gradient place]]):gmatch "%S+" do inside[name] = true end

-- The products whose outputs reach node `n`'s input through such operations, and all nodes between; nil when
-- something else does.
local function feeders(nodes, n)
  local found, between, queue = {}, {}, { n.inputs[1] }
  while #queue > 0 do
    local id = table.remove(queue)
    local x = nodes[id]
    if x.op == "linear" then
      if not between[id] then found[#found + 1] = id end
      between[id] = true
    elseif inside[x.op] and #x.inputs > 0 then
      between[id] = true
      for _, k in ipairs(x.inputs) do if not between[k] then queue[#queue + 1] = k end end
    elseif not (x.op == "full" or (x.op == "param" and #x.shape == 0)) then
      return nil
    end
  end
  return found, between
end

function T.place(graph, p)
  if p.tensor == 1 then return end
  local nodes, users, by = graph:nodes(), {}, {}
  for i, n in ipairs(nodes) do
    for _, k in ipairs(n.inputs) do
      users[k] = users[k] or {}
      table.insert(users[k], i)
    end
  end
  local function weight(id) return nodes[nodes[id].inputs[2]] end
  local function divide(id, dim, padded)
    by[id] = dim
    local w, b = weight(id), nodes[nodes[id].inputs[3]]
    if w.op ~= "param" or w.placed then return end
    graph:place(w.name, { tensor = ("S(%d)"):format(dim) }, padded)
    if b and b.op == "param" and dim == 0 then graph:place(b.name, { tensor = "S(0)" }, padded) end
  end
  local function only(between, last) -- what lies between is used nowhere else
    for id in util.sorted(between) do
      for _, u in ipairs(users[id]) do if u ~= last and not between[u] then return false end end
    end
    return true
  end
  for i, n in ipairs(nodes) do
    local found, between = {}, nil
    if n.op == "linear" then found, between = feeders(nodes, n) end
    local free = found and #found > 0 and only(between, i)
    for _, f in ipairs(found or {}) do free = free and by[f] == nil end
    if free then
      for _, f in ipairs(found) do divide(f, 0) end
      divide(i, 1)
    end
  end
  for i, n in ipairs(nodes) do
    if n.op == "embedding" and weight(i).op == "param" and not weight(i).placed then graph:place(weight(i).name, { tensor = "S(0)" }, true) end
    if n.op == "linear" and by[i] == nil and users[i] and nodes[users[i][1]].op == "cross_entropy" then
      divide(i, 0, true)
    end
  end
  for i, n in ipairs(nodes) do -- a lone product, when there was nothing else
    if n.op == "linear" and next(by) == nil then divide(i, weight(i).shape[2] % p.tensor == 0 and 1 or 0) end
  end
  if next(by) == nil then
    util.fail("dt.job: parallel: tensor = %d, but the model has no product to divide; tensor = 1 works", p.tensor)
  end
end

return T
