-- Sequential and Residual.
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local container = {}

container.Sequential = M.module("Sequential")

--- nn.Sequential{ a, b, ... }: each module or function receives the one before's result. Children are "0", "1", ...
function container.Sequential:init(list)
  util.check("nn.Sequential", list, "table")
  local n = 0
  for key in util.sorted(list) do
    n = n + 1
    if key ~= n then
      util.fail("nn.Sequential wants a list without gaps, got the key %s; write nn.Sequential{ a, b, ... }",
        util.show(key))
    end
  end
  for i, m in ipairs(list) do
    if not util.callable(m) then
      util.fail("nn.Sequential: entry %d is %s (%s), not a module or function", i, util.show(m), util.kind(m))
    end
    if util.kind(m) == "module class" then
      util.fail("nn.Sequential: entry %d is the class %s; make an instance: %s(...)", i, m.name, m.name)
    end
    self[i] = m
  end
end

function container.Sequential:forward(x, ...)
  local s = scope.current
  local path = s and s.lists and s.lists[self]
  for i = 1, #self do
    local name = path and ("%s%d"):format(path, i - 1)
    if i == 1 then x = scope.in_block(name, self[i], x, ...) else x = scope.in_block(name, self[i], x) end
  end
  return x
end

container.Residual = M.module("Residual")

--- nn.Residual(inner [, shortcut]): x + inner(x), or shortcut(x) + inner(x) (He et al. 2016).
function container.Residual:init(inner, shortcut)
  util.check("nn.Residual", inner, "module|callable")
  if shortcut ~= nil then util.check("nn.Residual: shortcut", shortcut, "module|callable") end
  self.inner = inner
  self.shortcut = shortcut
end

function container.Residual:forward(x)
  local y, short = self.inner(x), x
  if self.shortcut then short = self.shortcut(x) end
  return ops.add(short, y)
end

return container
