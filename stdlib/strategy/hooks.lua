-- Gradient hooks of the library: parallel = { gradient = { hook = dt.hooks.powersgd { rank = 2 } } }. What a hook gets and
-- returns: data.lua. Those with error feedback add to the next gradient what they did not send of this one.
local collective = require "dtrain.collective"
local ops = require "dtrain.ops"
local util = require "dtrain.util"

local hooks = {}

-- What the rank still owes; nothing of a step that overflowed.
local function owed(bucket, info)
  local state = info:state("error", bucket:shape())
  return bucket + state, function(rest) info:assign(state, ops.where(ops.isfinite(rest), rest, 0)) end
end

--- Gradients travel in 16 bits.
function hooks.bf16(bucket, info) return bucket:to "bf16":all_reduce(info.axes, "mean"):to "f32" end

--- hierarchical{ inner = n }: reduce within blocks of n neighbours, across blocks, and gather again.
function hooks.hierarchical(o)
  o = util.options("dt.hooks.hierarchical", o, { { "inner", "count", required = true } })
  return function(bucket, info)
    if info.ranks % o.inner ~= 0 then
      util.fail("dt.hooks.hierarchical: blocks of %d do not divide %d ranks; inner = 1 or %d would", o.inner, info.ranks,
        info.ranks)
    end
    return bucket:reduce_scatter(info.axes, "mean", { part = o.inner }):all_reduce(info.axes, "mean", { part = -o.inner })
      :all_gather(info.axes, { part = o.inner })
  end
end

local function column(m, i) return m:slice { dim = 1, start = i, stop = i + 1 } end

-- Gram and Schmidt's orthogonal columns.
local function orthogonal(m, rank)
  local out = {}
  for i = 0, rank - 1 do
    local c = column(m, i)
    for _, q in ipairs(out) do c = c - q * (q * c):sum() end
    out[#out + 1] = c / (c:norm() + 1e-12)
  end
  return rank == 1 and out[1] or ops.concat(out, 1)
end

--- powersgd{ rank = 2 }: matrices as products of two thin ones, with error feedback (Vogels et al. 2019).
function hooks.powersgd(o)
  local rank = util.options("dt.hooks.powersgd", o, { { "rank", "count", 2 } }).rank
  return function(bucket, info)
    local x, owe = owed(bucket, info)
    local parts, thin, at = {}, {}, 0 -- parts of the bucket in order: a matrix to compress, or as it is
    local function piece(stop) return x:slice { dim = 0, start = at, stop = stop } end
    for _, p in ipairs(info.parameters) do
      local rows = #p.shape > 1 and p.shape[1] or p.numel
      local cols = p.numel // math.max(rows, 1)
      if #p.shape > 1 and rank * (rows + cols) < p.numel then
        if p.begin > at then parts[#parts + 1] = { plain = piece(p.begin) } end
        at = p.begin
        local part = { m = piece(at + p.numel):reshape { rows, cols },
          q = info:state("q." .. p.name, { cols, rank }, { init = { "normal", 0, 1 } }) }
        at = at + p.numel
        parts[#parts + 1], thin[#thin + 1] = part, part
      end
    end
    if at < bucket:numel() then parts[#parts + 1] = { plain = piece(bucket:numel()) } end
    local tall = collective.means(util.map(thin, function(t) return t.m:matmul(t.q) end), info.axes)
    for i, p in ipairs(tall) do thin[i].p = orthogonal(p, rank) end
    local sent = collective.means(util.map(parts, function(t) return t.plain or t.m:permute { 1, 0 }:matmul(t.p) end), info.axes)
    local out, rest = {}, {}
    for i, t in ipairs(parts) do
      if t.plain then
        out[i], rest[i] = sent[i], t.plain * 0
      else
        info:assign(t.q, ops.where(ops.isfinite(sent[i]), sent[i], 1))
        local whole = t.p:matmul(sent[i]:permute { 1, 0 })
        out[i], rest[i] = whole:reshape { whole:numel() }, (t.m - whole):reshape { whole:numel() }
      end
    end
    owe(ops.concat(rest, 0))
    return ops.concat(out, 0)
  end
end

--- topk{ fraction = 0.01 }: the largest elements only, with error feedback (Aji and Heafield 2017).
function hooks.topk(o)
  local fraction = util.options("dt.hooks.topk", o, { { "fraction", "fraction", 0.01 } }).fraction
  return function(bucket, info)
    local x, owe = owed(bucket, info)
    local n = x:numel()
    local _, index = ops.topk(ops.abs(x), { k = math.max(1, math.floor(fraction * n)) })
    local value = ops.gather(x, index, { dim = 0 })
    local function spread(i, v) return ops.scatter_add(i, v, { dim = 0, shape = { n } }) end
    owe(x - spread(index, value))
    return spread(index:all_gather(info.axes), value:all_gather(info.axes)) / info.ranks
  end
end

--- one_bit: signs, and what they mean on average, with error feedback (Seide et al. 2014).
function hooks.one_bit(bucket, info)
  local x, owe = owed(bucket, info)
  local above = ops.ge(x, 0)
  local ups = above:to "f32":sum()
  local up = ops.where(above, x, 0):sum() / (ups + 1e-12)
  local down = ops.where(above, 0, x):sum() / (x:numel() - ups + 1e-12)
  owe(x - ops.where(above, up, down))
  local n = info.ranks
  local bits = ops.pack_signs(x):all_gather(info.axes)
  local signs = ops.unpack_signs(bits:reshape { n, bits:numel() // n })
  local ends = ops.stack({ up, down }):all_gather(info.axes):reshape { n, 2 }
  local u, d = column(ends, 0), column(ends, 1)
  local whole = ((u - d) / 2):permute { 1, 0 }:matmul(signs):reshape { x:numel() } + ((u + d) / 2):sum()
  return whole / n
end

--- adasum: gradients that agree are averaged, those at right angles added, parameter by parameter, in a tree of pairs
--- (Maleki et al. 2020).
function hooks.adasum(bucket, info)
  local n, len = info.ranks, bucket:numel()
  local all = bucket:all_gather(info.axes):reshape { n, len }
  local out = {}
  for i, p in ipairs(info.parameters) do
    local next = info.parameters[i + 1]
    local rows = {}
    for r = 0, n - 1 do
      rows[#rows + 1] = all:slice { dim = 0, start = r, stop = r + 1 }:reshape { len }:slice { dim = 0, start = p.begin,
        stop = next and next.begin or len }
    end
    while #rows > 1 do
      local up = {}
      for k = 1, #rows, 2 do
        local a, b = rows[k], rows[k + 1]
        if b then
          local dot = (a * b):sum()
          a = a * (1 - dot / (2 * (a * a):sum() + 1e-30)) + b * (1 - dot / (2 * (b * b):sum() + 1e-30))
        end
        up[#up + 1] = a
      end
      rows = up
    end
    out[i] = rows[1]
  end
  return #out == 1 and out[1] or ops.concat(out, 0)
end

return util.strict(hooks, "dt.hooks")
