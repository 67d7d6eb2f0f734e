"""The rewrite engine: one pass bottom-up; None keeps, a tuple splices, () deletes."""

from dovetail.ir.expr import Binary, Int, Name
from dovetail.ir.low.nodes import Block, Break, ExprStmt
from dovetail.ir.node import rewrite, rewrite_node


def add(left, right):
    return Binary(op="+", left=left, right=right)


def fold(node):
    if isinstance(node.left, Int) and isinstance(node.right, Int):
        return Int(value=node.left.value + node.right.value)
    return None


ONE, TWO, X = Int(value=1), Int(value=2), Name(id="x")


def test_rules_see_children_already_rewritten():
    tree = add(add(ONE, TWO), add(ONE, TWO))
    assert rewrite_node(tree, [(Binary, fold)]) == Int(value=6)


def test_an_unchanged_tree_is_the_same_object():
    tree = add(X, add(X, ONE))
    assert rewrite_node(tree, [(Binary, fold)]) is tree


def test_the_first_rule_that_changes_wins():
    rules = [(Binary, fold), (Binary, lambda node: X), (Binary, lambda node: ONE)]
    assert rewrite_node(add(X, add(ONE, TWO)), rules) == X


def test_statements_are_deleted_and_spliced():
    block = Block(body=(ExprStmt(expr=X), Break(), ExprStmt(expr=ONE)))
    rules = [
        (Break, lambda node: ()),
        (ExprStmt, lambda node: (node, node) if node.expr == ONE else None),
    ]
    twice = ExprStmt(expr=ONE)
    assert rewrite(block, rules) == Block(body=(ExprStmt(expr=X), twice, twice))
