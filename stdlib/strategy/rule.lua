-- The verb rule: where an operation's inputs must lie on an axis, and its results then do, by a strategy instead of the library.
--
--   rule(node, axis, p) -> nil (as the library says), or { inputs = places, outputs = places }, one for each
--
-- node is an entry of g:nodes() with node.lies (where its inputs lie on the axis: "R", "S(dim)"), node.shapes (of its inputs) and
-- node.results (the shapes that it makes), all whole on this axis. A place is "R" (whole), "S(dim)" (divided by that dim) or, of an
-- output, "P" (each rank has a summand).
local util = require "dtrain.util"

local M = {}

-- Places as graph:compile reads them: the dim, -1 for "R", -2 for "P". shapes: of what they are places of.
local function numbers(fail, what, places, shapes, ranks)
  if type(places) ~= "table" or #places ~= #shapes then
    fail("%s must be a list of %d place%s, got %s", what, #shapes, #shapes == 1 and "" or "s", util.show(places))
  end
  return util.map(places, function(place, i)
    if place == "R" then return -1 end
    if place == "P" and what == "outputs" then return -2 end
    local dim = math.tointeger(type(place) == "string" and place:match "^S%((%d+)%)$")
    if not dim then
      fail('%s[%d] is "R", "S(dim)"%s, got %s', what, i, what == "outputs" and ' or "P"' or "", util.show(place))
    end
    local size = shapes[i][dim + 1]
    if not size then fail("%s[%d] = %q, but it has %d dims, from 0", what, i, place, #shapes[i]) end
    if size % ranks ~= 0 then
      fail("%s[%d] = %q, but its dim %d has %d elements, which do not divide among %d ranks; return nil there", what, i, place, dim,
        size, ranks)
    end
    return dim
  end)
end

--- What graph:compile asks: f(node, axis, ranks) -> places of the inputs, of the outputs, position of the rule; nil: no strategy
--- has a rule for it.
function M.new(strategies)
  if #strategies:with "rule" == 0 then return nil end
  return function(node, axis, ranks)
    local at, name
    local answer = strategies:one("rule", function(s)
      local a = s.rule(node, axis, strategies.p)
      if a ~= nil then at, name = util.defined_at(s.rule), s.name end
      return a
    end)
    if answer == nil then return nil end
    local function fail(fmt, ...)
      util.fail_at(at, "rule of strategy %s, for %s over %q: " .. fmt, name, node.op, axis, ...)
    end
    if type(answer) ~= "table" then
      fail("it returns { inputs = places, outputs = places }, or nil; got %s", util.show(answer))
    end
    answer = util.options(("rule of strategy %s"):format(name), answer,
      { { "inputs", "table", required = true }, { "outputs", "table", required = true } }, at)
    local inputs = numbers(fail, "inputs", answer.inputs, node.shapes, ranks)
    local outputs = numbers(fail, "outputs", answer.outputs, node.results, ranks)
    local divided = util.filter(inputs, function(d) return d >= 0 end)
    for i, d in ipairs(outputs) do
      if #divided > 0 and d == -1 then
        fail('outputs[%d] = "R", but it is made of divided inputs, so ranks hold different values; it is "S(dim)" or "P"', i)
      elseif #divided == 0 and d ~= -1 then
        fail("outputs[%d] = %q, but all inputs are whole, and so is what is made of them", i, answer.outputs[i])
      end
    end
    return inputs, outputs, at
  end
end

return M
