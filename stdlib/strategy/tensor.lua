-- Tensor parallelism: layers are divided over the axis "tensor" (Shoeybi et al. 2019), and sequences too between them
-- (Korthikanti et al. 2022). It reads the traced graph alone: where a product feeds another through operations that
-- work within a column (activations, heads of attention), the first is divided by its outputs and the second by its
-- inputs, so that one reduction serves both. Embeddings and the product that feeds the cross-entropy are divided by
-- vocabulary. What a script places itself (nn.Linear { ..., place = }) stays.
local products = require "dtrain.strategy.products"
local util = require "dtrain.util"

local T = { name = "tensor", options = { { "tensor", "count", 1 }, { "sequence", "boolean", false } } }

--- parallel = { tensor = ranks, sequence = false }
function T.check(p)
  if p.sequence and p.tensor == 1 then
    util.fail("dt.job: parallel: sequence = true divides sequences over the axis tensor; give tensor = 2 or more")
  end
end

function T.axes(p) return { { name = "tensor", size = p.tensor } } end

local function check_heads(graph, n, ranks)
  if n.op ~= "attention" then return end
  local shapes, dim = graph:input_shapes(n), n.attrs.bthd and 3 or 2
  local q, k = shapes[1][dim], shapes[2][dim]
  if q % ranks ~= 0 or k % ranks ~= 0 then
    local fits = {}
    for d = 1, math.min(q, k) do if q % d == 0 and k % d == 0 then fits[#fits + 1] = d end end
    util.fail("dt.job: parallel: attention with %d heads and %d key/value heads does not divide by tensor = %d; tensor = %s would",
      q, k, ranks, table.concat(fits, " or "))
  end
end

-- What stands behind a product that is divided by its inputs, or an embedding, is divided by its dim 1 where it is [batch,
-- sequence, width].
local function divide_sequences(graph, nodes, by, ranks)
  local any = false
  for i, n in ipairs(nodes) do
    local partial = n.op == "linear" and by[i] == 1 or n.op == "embedding" and by[i] == 0
    if partial and #n.shape >= 3 then
      any = true
      if n.shape[2] % ranks ~= 0 then
        util.fail("dt.job: parallel: a sequence of %d does not divide among the %d ranks of axis \"tensor\"; %d would, or "
          .. "sequence = false", n.shape[2], ranks, n.shape[2] + ranks - n.shape[2] % ranks)
      end
      graph:place(n, { tensor = "S(1)" })
    end
  end
  if not any then
    util.fail("dt.job: parallel: sequence = true divides dim 1 of activations [batch, sequence, width] behind a product that is "
      .. "divided by its inputs; this model has none, sequence = false works")
  end
end

function T.place(graph, p)
  if p.tensor == 1 then return end
  local nodes, by = graph:nodes(), {} -- by: the dim of its weight along which a product is divided
  local users = products.users(nodes)
  local function weight(id) return nodes[nodes[id].inputs[2]] end
  local function divide(id, dim, padded)
    by[id] = dim
    local w, b = weight(id), nodes[nodes[id].inputs[3]]
    if w.op ~= "param" or w.placed then return end
    graph:place(w.name, { tensor = ("S(%d)"):format(dim) }, padded)
    if b and b.op == "param" and dim == 0 then graph:place(b.name, { tensor = "S(0)" }, padded) end
  end
  for i, n in ipairs(nodes) do
    local found, between = {}, nil
    if n.op == "linear" then found, between = products.feeders(nodes, n) end
    local free = found and #found > 0 and products.only(users, between, i)
    for _, f in ipairs(found or {}) do free = free and by[f] == nil end
    if free then
      for id in util.sorted(between) do check_heads(graph, nodes[id], p.tensor) end
      for _, f in ipairs(found) do divide(f, 0) end
      divide(i, 1)
    end
  end
  for i, n in ipairs(nodes) do
    if n.op == "embedding" and weight(i).op == "param" and not weight(i).placed then
      graph:place(weight(i).name, { tensor = "S(0)" }, true)
      by[i] = 0
    end
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
  if p.sequence then divide_sequences(graph, nodes, by, p.tensor) end
end

return T
