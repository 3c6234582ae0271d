-- Metrics of an evaluation: traced sums over a microbatch and what they count, added over the exact evaluation set
-- and over ranks, then divided. A metric is { name, trace = function(output, targets, loss, count) -> sum, count,
-- finish = function(mean) }.
local ops = require "dtrain.ops"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local Metric = { __name = "metric" }

local metrics = {}

local function metric(name, trace, finish)
  return setmetatable({ name = name, trace = trace, finish = finish or function(mean) return mean end }, Metric)
end

-- Labels that count (bool), the same as 1 and 0, and their number: what the loss ignores is left out; where the loss is no cross
-- entropy, its default ignore_index. output[..., C] must be one row of classes for each label.
local function valid(what, output, targets)
  local want, have = output:shape(), targets:shape()
  local classes = table.remove(want)
  local same = classes and #want == #have
  for i = 1, #have do same = same and want[i] == have[i] end
  if not same then
    util.fail("metric %s: the output is %s, so the labels must be %s, but the targets are %s; reshape one of them", what,
      util.show(output:shape()), util.show(want), util.show(have))
  end
  local ok
  for _, index in ipairs(scope.ignored() or { -100 }) do
    local one = ops.ne(targets, index)
    ok = ok and ops.mul(ok, one) or one
  end
  local weight = ops.cast(ok, { dtype = "f32" })
  return ok, weight, ops.sum(weight)
end

--- The mean loss.
metrics.loss = metric("loss", function(_, _, loss, count) return loss * count, count end)

--- exp of the mean loss.
metrics.perplexity = metric("perplexity", metrics.loss.trace, math.exp)

--- Share of labels that the largest logit names: logits[..., C], labels[...].
metrics.accuracy = metric("accuracy", function(output, targets)
  local _, weight, n = valid("accuracy", output, targets)
  local hit = ops.cast(ops.eq(ops.argmax(output, { dim = -1 }), targets), { dtype = "f32" })
  return ops.sum(hit * weight), n
end)

--- metrics.top_k(k): share of labels among the k largest logits; a label counts when fewer than k logits are larger.
function metrics.top_k(k)
  util.check("metrics.top_k", k, "count")
  return metric("top_" .. k, function(output, targets)
    local ok, weight, n = valid("top_" .. k, output, targets)
    local label = ops.unsqueeze(ops.where(ok, targets, 0), -1)
    local own = ops.gather(output, label, { dim = -1 })
    local larger = ops.sum(ops.cast(ops.gt(output, own), { dtype = "f32" }), { dims = { -1 } })
    local hit = ops.cast(ops.lt(larger, k), { dtype = "f32" })
    own = ops.squeeze(own, -1)
    hit = ops.where(ops.eq(own, own), hit, ops.cast(own, { dtype = "f32" })) -- a label out of range: NaN, and the evaluation says so
    return ops.sum(hit * weight), n
  end)
end

--- metrics.custom(name, function(output, targets) -> sum, count [, finish]): one's own.
function metrics.custom(name, trace, finish)
  return metric(util.check("metrics.custom: name", name, "string"), util.check("metrics.custom", trace, "callable"),
    finish)
end

local words = { "loss", "accuracy", "perplexity", "top_5" }

--- Metrics from a job's list of names and metrics; loss always comes first.
function metrics.list(given)
  local out, seen = { metrics.loss }, { loss = true }
  for i, m in ipairs(given or {}) do
    if type(m) == "string" then
      local k = m:match("^top_(%d+)$")
      if k then
        m = metrics.top_k(math.tointeger(tonumber(k)))
      elseif m == "loss" or m == "accuracy" or m == "perplexity" then
        m = metrics[m]
      else
        util.fail("eval: metrics[%d]: no metric '%s'; %s", i, m, util.suggest(m, words))
      end
    elseif getmetatable(m) ~= Metric then
      util.fail("eval: metrics[%d] wants a name or a metric, got %s", i, util.show(m))
    end
    if not seen[m.name] then
      seen[m.name] = true
      out[#out + 1] = m
    end
  end
  return out
end

return metrics
