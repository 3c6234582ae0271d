-- The update of a job's parameters: the optimizer, and what the strategies' verb update puts around it. A verb gets an entry:
--
--   entry.name, entry.shape            of the parameter
--   entry.param, entry.grad            symbols: its value, its gradient after clipping
--   entry:unclipped()                  its gradient before clipping
--   entry.lr, entry.step               symbols: the learning rate of its group, the number of this update from 1
--   entry:optimizer(grad)              -> the new value, as the optimizer (or the strategy before) makes it; once
--   entry:state(name, init)            memory of the parameter's shape that is saved; init: a number (0), or entry.param to
--                                      begin as it
--   entry:assign(state, value)         writes it
-- and returns the new value. Where the parameter is in shares, so are its states, and the nodes become nodes on shares.
local core = require "dtrain.core"
local util = require "dtrain.util"

local M = {}

local Entry = {}
Entry.__index = function(e, key)
  if key == "lr" then return e.graph:hyper("lr", e.group) end
  if key == "step" then return e.graph:hyper("t", 0) end
  return Entry[key]
end

function Entry:optimizer(grad)
  if self.used then
    util.fail("update: entry:optimizer of %s was called already; an optimizer takes one step for each update", self.name)
  end
  self.used = true
  return self.inner(grad)
end

function Entry:state(name, init)
  if init ~= nil and init ~= self.param and type(init) ~= "number" then
    util.fail("update: the state %s of %s begins as a number or as entry.param, got %s", name, self.name, util.show(init))
  end
  return self.graph:state(self.param, name, init)
end

function Entry:unclipped() return self.graph:unclipped(self.param) end

function Entry:assign(state, value) self.graph:assign(state, value) end

-- The new value of a parameter by strategy i of the list and those before it; 0: the optimizer.
local function value(job, p, graph, entry, list, i, grad)
  if i == 0 then return job.optimizer:value(graph, entry, grad) end
  local s = list[i]
  local e = setmetatable({ graph = graph, name = entry.name, shape = entry.param:shape(), param = entry.param, grad = grad,
    group = entry.group, inner = function(g) return value(job, p, graph, entry, list, i - 1, g) end }, Entry)
  local new = s.update(e, graph, p)
  if not core.is_symbolic(new) then
    util.fail_at(util.defined_at(s.update), "update of strategy %s must return the new value of %s, got %s", s.name, entry.name,
      util.show(new))
  end
  return new
end

--- parallel: the strategies; entries: what graph:compile gives `update`. Parameters without a gradient are left alone, as in
--- PyTorch. An optimizer sees of a parameter its group, dtype and shape alone: it is traced for the first one of each, which is
--- then the template of the others. A strategy's verb knows the name, and is asked for each.
function M.trace(job, parallel, graph, entries)
  local list, templates = parallel:with "update", {}
  for _, entry in ipairs(entries) do
    if entry.grad then
      local kind = ("%d %s %s"):format(entry.group, entry.param:dtype(), table.concat(entry.param:shape(), " "))
      local template = #list == 0 and templates[kind]
      if template then
        graph:again(template, entry)
      else
        local from = graph:count()
        graph:assign(entry.param, value(job, parallel.p, graph, entry, list, #list, entry.grad))
        templates[kind] = { param = entry.param, grad = entry.grad, from = from, to = graph:count() }
      end
    end
  end
end

return M
